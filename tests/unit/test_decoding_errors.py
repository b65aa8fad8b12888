"""What the engine says to a request that can't be, and that it hurts no other."""

from __future__ import annotations

import pytest
import torch

from decoding_reference import biased, hf_greedy
from mars_lm.decoding import Engine, generate
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint

ONE_TOKEN = DecodingSettings(tau=1.0, max_new_tokens=4)


@pytest.fixture(scope="module")
def checkpoint():
    return tiny_checkpoint()


@pytest.mark.parametrize(
    ("prompt", "settings", "sentence"),
    [
        ([], ONE_TOKEN, "prompt is empty"),
        ([5, -1], ONE_TOKEN, r"token id -1.*0 to 319"),
        ([5, 320], ONE_TOKEN, r"token id 320.*0 to 319"),
        ([5] * 256, ONE_TOKEN, r"256 tokens.*holds 256"),
        ([5], DecodingSettings(block_size=5), "trained with 4"),
        ([5], DecodingSettings(bad_words_ids=((7, 320),)), r"bad_words_ids.*id 320.*0 to 319"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(checkpoint, prompt, settings, sentence):
    engine = Engine(checkpoint)
    running = engine.add([5, 6], ONE_TOKEN)
    with pytest.raises(MarsError, match=sentence):
        engine.add(prompt, settings)
    for _ in engine.stream():
        pass
    assert engine.result(running).token_ids == hf_greedy(checkpoint, [5, 6], 4)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"max_rows": 0}, "max_rows is 0, expected a whole number of 1 or more"),
        ({"max_length": 1}, "max_length is 1, expected 2 tokens or more"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0, expected a whole number of 1 or more"),
        ({"commit_block": "4"}, "commit_block is '4', expected 0"),
    ],
)
def test_an_engine_in_which_nothing_could_run_is_refused(checkpoint, sizes, sentence):
    with pytest.raises(MarsError, match=sentence):
        Engine(checkpoint, **sizes)


def test_the_last_position_of_the_context_is_used(checkpoint):
    (result,) = generate(checkpoint, [[5] * 255], DecodingSettings(max_new_tokens=50))
    assert len(result.token_ids) == 1
    assert result.finish_reason == "length"


def test_a_plain_model_decodes_one_token_at_a_time_only():
    plain = tiny_checkpoint(mars=False)
    engine = Engine(plain)
    with pytest.raises(MarsError, match=r"tau 1.*MARS checkpoint"):
        engine.add([5, 6], DecodingSettings())
    engine.add([5, 6], ONE_TOKEN)
    (last,) = [output.finish_reason for output in engine.stream() if output.finish_reason]
    assert last == "length"


def test_unknown_requests_and_unequal_lists(checkpoint):
    engine = Engine(checkpoint)
    request = engine.add([5, 6], ONE_TOKEN)
    assert engine.result(request).finish_reason is None  # still waiting: the numbers so far
    for _ in engine.stream():
        pass
    engine.cancel(request)  # too late to matter
    assert engine.result(request).finish_reason == "length"
    for call in (engine.result, engine.cancel):
        with pytest.raises(MarsError, match="no request"):
            call(request)
    with pytest.raises(MarsError, match="one for all"):
        generate(checkpoint, [[5], [6]], [ONE_TOKEN])


def test_cancelled_requests_keep_their_tokens_and_free_their_rows(checkpoint):
    engine = Engine(checkpoint, max_rows=1)
    running, waiting, last = (engine.add([5, 6, 7], ONE_TOKEN) for _ in range(3))
    engine.step()
    engine.step()
    engine.cancel(waiting)
    engine.cancel(running)
    assert engine.result(waiting).token_ids == []
    stopped = engine.result(running)
    assert stopped.finish_reason == "cancelled"
    assert stopped.token_ids == hf_greedy(checkpoint, [5, 6, 7], 2)
    for _ in engine.stream():
        pass
    assert engine.result(last).token_ids == hf_greedy(checkpoint, [5, 6, 7], 4)


@pytest.mark.parametrize("settings", [ONE_TOKEN, DecodingSettings(max_new_tokens=4)])
def test_a_row_whose_logits_are_no_numbers_ends_alone(settings):
    checkpoint = biased(tiny_checkpoint(tied=False))  # so that no draft holds the poisoned token
    with torch.no_grad():
        checkpoint.model.get_input_embeddings().weight[99] = torch.nan
    wanted = hf_greedy(checkpoint, [5, 6, 7], 4)
    engine = Engine(checkpoint, max_rows=2)
    good, bad, late = (engine.add(ids, settings) for ids in ([5, 6, 7], [5, 99, 7, 8, 9], [5, 6, 7]))
    for _ in engine.stream():
        pass
    broken = engine.result(bad)
    assert broken.finish_reason == "error"
    assert broken.token_ids == []
    assert "NaN" in broken.error
    for request in (good, late):  # the late one takes the broken one's row
        assert engine.result(request).token_ids == wanted
