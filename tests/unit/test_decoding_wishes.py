"""What a request may ask besides its mode: ends, stop strings, penalties, bad words, log-probabilities."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from decoding_reference import biased, hf_greedy, logits_of
from mars_lm.decoding import Engine, generate
from mars_lm.decoding.text import TextStream
from mars_lm.detokenizer import decode
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint, tiny_tokenizer

MODES = {
    "one-token": {"tau": 1.0},
    "exact": {},
    "exact, no recovery": {"recovery": False, "tau": 0.3},
    "lossy": {"exact": False, "tau": 0.2},
}
PROMPTS = [[5, 6, 7], [9] * 17, [40], [33, 44, 55, 66]]


@pytest.fixture(scope="module")
def checkpoint():
    return biased(tiny_checkpoint(), range(60, 80), gain=2.5)


def test_a_stop_string_across_tokens_is_found_and_never_shown():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("hello ENDgame world, é! END. after", add_special_tokens=False)
    for size in range(1, 6):
        stream, shown, taken = TextStream(tokenizer, ("END.", "never")), [], 0
        for begin in range(0, len(ids), size):
            piece, stop = stream.push(ids[begin : begin + size])
            shown.append(piece)
            if stop is not None:
                taken = begin + stop
                break
        assert "".join(shown) == "hello ENDgame world, é! "
        assert decode(tokenizer, ids[:taken]).startswith("hello ENDgame world, é! END.")
        assert not decode(tokenizer, ids[: taken - 1]).startswith("hello ENDgame world, é! END.")
        assert not any(piece.endswith(("E", "EN", "END", "\ufffd")) for piece in shown)


def test_what_was_held_back_comes_at_the_end():
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, ("world!",))
    pieces = [stream.push([token])[0] for token in tokenizer.encode("a world", add_special_tokens=False)]
    assert "".join(pieces) == "a "
    assert stream.finish() == "world"


@pytest.mark.parametrize("mode", MODES)
def test_stop_strings_end_a_request_where_one_token_steps_would(checkpoint, mode):
    settings = DecodingSettings(max_new_tokens=24, **MODES[mode])
    for prompt in PROMPTS[:2]:
        (whole,) = generate(checkpoint, [prompt], settings)
        assert whole.text == decode(checkpoint.tokenizer, whole.token_ids)
        stop = whole.text[5:8]
        engine = Engine(checkpoint, max_rows=2)
        request = engine.add(prompt, dataclasses.replace(settings, stop=(stop,)))
        engine.add([8, 9], settings)
        texts = [output.text for output in engine.stream() if output.request_id == request]
        result = engine.result(request)
        assert "".join(texts) == result.text == whole.text[: whole.text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        assert sum(result.accepted_lengths) == len(result.token_ids)
        assert stop in decode(checkpoint.tokenizer, result.token_ids)
        assert stop not in decode(checkpoint.tokenizer, result.token_ids[:-1])


@pytest.mark.parametrize("mode", MODES)
def test_stop_ids_minimum_and_ignored_ends(checkpoint, mode):
    settings = DecodingSettings(max_new_tokens=20, **MODES[mode])
    (plain,) = generate(checkpoint, [PROMPTS[0]], settings)
    end = plain.token_ids[4]
    stopping = dataclasses.replace(settings, stop_token_ids=(end,))
    (stopped,) = generate(checkpoint, [PROMPTS[0]], stopping)
    cut = plain.token_ids[: plain.token_ids.index(end) + 1]
    assert (stopped.token_ids, stopped.finish_reason) == (cut, "stop")
    assert stopped.text == decode(checkpoint.tokenizer, cut[:-1])
    (late,) = generate(checkpoint, [PROMPTS[0]], dataclasses.replace(stopping, min_new_tokens=10))
    assert end not in late.token_ids[:10]
    if settings.exact:
        before = checkpoint.model.generation_config.eos_token_id
        checkpoint.model.generation_config.eos_token_id = [before, end]
        try:
            wanted = hf_greedy(checkpoint, PROMPTS[0], 20)
            (ended,) = generate(checkpoint, [PROMPTS[0]], settings)
            (ignoring,) = generate(checkpoint, [PROMPTS[0]], dataclasses.replace(settings, ignore_eos=True))
        finally:
            checkpoint.model.generation_config.eos_token_id = before
        assert ended.token_ids == wanted == cut
        assert len(ignoring.token_ids) == 20


def hf_processed(checkpoint, prompt, **options):
    output = checkpoint.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=[checkpoint.mars.mask_token_id],
        **options,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("mode", ["one-token", "exact", "exact, no recovery"])
def test_repetition_and_bad_words_as_transformers_has_them(checkpoint, mode):
    (plain,) = generate(checkpoint, [PROMPTS[0]], DecodingSettings(max_new_tokens=20, tau=1.0))
    words = ((plain.token_ids[2],), tuple(plain.token_ids[4:6]))
    settings = DecodingSettings(max_new_tokens=20, repetition_penalty=1.4, bad_words_ids=words, **MODES[mode])
    results = generate(checkpoint, PROMPTS, settings, max_rows=3)
    for prompt, result in zip(PROMPTS, results, strict=True):
        wanted = hf_processed(
            checkpoint, prompt, repetition_penalty=1.4, bad_words_ids=[list(word) for word in words]
        )
        assert result.token_ids == wanted


@pytest.mark.parametrize("mode", ["one-token", "exact", "exact, no recovery"])
def test_presence_and_frequency_along_the_run(checkpoint, mode):
    settings = DecodingSettings(max_new_tokens=20, presence_penalty=1.5, frequency_penalty=0.7, **MODES[mode])
    for prompt, result in zip(PROMPTS, generate(checkpoint, PROMPTS, settings), strict=True):
        said: list[int] = []
        for token in result.token_ids:
            logits = logits_of(checkpoint, prompt + said)[-1].clone()
            for seen in set(said):
                logits[seen] -= 1.5 + 0.7 * said.count(seen)
            assert token == int(logits.argmax())
            said.append(token)


def test_lossy_guesses_are_penalised_along_the_run(checkpoint):
    words = tuple((t, u) for t in range(320) for u in [t])  # no token twice in a row
    settings = DecodingSettings(max_new_tokens=30, tau=0.0, exact=False, bad_words_ids=words)
    for result in generate(checkpoint, PROMPTS, settings):
        assert all(a != b for a, b in zip(result.token_ids, result.token_ids[1:], strict=False))
        assert max(result.accepted_lengths) == 4


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_the_models_own(checkpoint, mode):
    settings = DecodingSettings(max_new_tokens=12, logprobs=3, temperature=0.8, seed=1, **MODES[mode])
    engine = Engine(checkpoint, max_rows=3)
    requests = [engine.add(prompt, settings) for prompt in PROMPTS[:2]]
    engine.add([8], DecodingSettings(max_new_tokens=12))
    outputs = list(engine.stream())
    for request, prompt in zip(requests, PROMPTS, strict=False):
        result = engine.result(request)
        said = [entry for o in outputs if o.request_id == request for entry in o.logprobs]
        assert said == result.logprobs
        assert [entry.token_id for entry in said] == result.token_ids
        for i, entry in enumerate(said):
            assert len(entry.top) == 3
            if settings.exact:  # AR's own; lossy mode says the masks'
                wanted = torch.log_softmax(logits_of(checkpoint, prompt + result.token_ids[:i])[-1], dim=-1)
                assert entry.logprob == pytest.approx(wanted[entry.token_id].item(), abs=1e-4)
                assert entry.top[0][1] == pytest.approx(wanted.max().item(), abs=1e-4)
    assert all(o.logprobs is None for o in outputs if o.request_id not in requests)


def test_a_request_is_changed_while_it_runs(checkpoint):
    wanted = hf_greedy(checkpoint, PROMPTS[0], 40)
    engine = Engine(checkpoint, max_rows=1)
    first = engine.add(PROMPTS[0], DecodingSettings(max_new_tokens=40))
    second = engine.add(PROMPTS[1], DecodingSettings(max_new_tokens=40))
    assert (engine.running, engine.waiting, engine.cache_use) == (0, 2, 0.0)
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)
    assert 0 < engine.cache_use < 1
    engine.update(second, tau=1.0)
    changes = [{"tau": 0.4}, {"tau": 1.0}, {"tau": 0.0, "block_size": 2}, {"rule": "margin", "block_size": 4}]
    for change in changes:
        engine.update(first, **change)
        engine.step()
        engine.step()
    assert engine.result(first).token_ids == wanted[: len(engine.result(first).token_ids)]
    engine.update(first, exact=False, rule="probability", tau=1.0)  # the draft at hand is dropped
    for _ in engine.stream():
        pass
    assert engine.result(first).token_ids == wanted
    result = engine.result(second)
    assert result.token_ids == hf_greedy(checkpoint, PROMPTS[1], 40)
    assert result.forwards == len(result.token_ids)
    assert result.queued_seconds > 0


def test_changes_that_cannot_be(checkpoint):
    engine = Engine(checkpoint)
    request = engine.add([5, 6], DecodingSettings(max_new_tokens=4))
    for change, sentence in (
        ({"block_size": 5}, "trained with 4"),
        ({"tau": 2.0}, "tau is 2.0"),
        ({"max_new_tokens": 9}, "max_new_tokens can't change"),
    ):
        with pytest.raises(MarsError, match=sentence):
            engine.update(request, **change)
    with pytest.raises(MarsError, match="no request"):
        engine.update(99, tau=1.0)
    for _ in engine.stream():
        pass
    assert engine.result(request).token_ids == hf_greedy(checkpoint, [5, 6], 4)
