"""Logits processors in the engine, and requests whose wishes leave no token to choose."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from decoding_reference import biased, hf_greedy
from mars_lm.decoding import Engine, generate
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint

MODES = {
    "one-token": {"tau": 1.0},
    "exact": {},
    "exact, no recovery": {"recovery": False, "tau": 0.3},
    "exact, one draft": {"block_size": 2},
}
PROMPTS = [[5, 6, 7], [9] * 17, [40], [33, 44, 55, 66]]


class TurnsAway:
    """Bars four of the likely tokens, by the sum of all ids before."""

    def __call__(self, input_ids, scores):
        scores[:, 60 + int(input_ids.sum()) % 5 : 80 : 5] -= 30.0  # in place, as many a processor does
        return scores


PROCESSORS = {
    "n-grams": [NoRepeatNGramLogitsProcessor(2)],
    "of one's own": [TurnsAway()],
    "several": [SequenceBiasLogitsProcessor({(61,): 2.5, (62, 63): -9.0}), TurnsAway()],
}


@pytest.fixture(scope="module")
def checkpoint():
    return biased(tiny_checkpoint(), range(60, 80), gain=2.5)


def transformers_says(checkpoint, prompt, processors, max_new_tokens=24):
    return hf_greedy(checkpoint, prompt, max_new_tokens, logits_processor=LogitsProcessorList(processors))


@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=list(PROCESSORS))
@pytest.mark.parametrize("mode", MODES)
def test_a_processor_does_what_transformers_does_with_it(checkpoint, mode, processors):
    engine = Engine(checkpoint, max_rows=5)
    settings = DecodingSettings(max_new_tokens=24, **MODES[mode])
    requests = [engine.add(prompt, settings, logits_processors=processors) for prompt in PROMPTS]
    plain = engine.add(PROMPTS[0], settings)
    for _ in engine.stream():
        pass
    results = [engine.result(request) for request in requests]
    wanted = [transformers_says(checkpoint, prompt, processors) for prompt in PROMPTS]
    assert [result.token_ids for result in results] == wanted
    untouched = transformers_says(checkpoint, PROMPTS[0], [])
    assert engine.result(plain).token_ids == untouched != wanted[0]
    if mode == "exact":  # drafts obey the processor too, or none would be confirmed
        assert sum(result.forwards for result in results) < sum(map(len, wanted))


def test_a_lossy_answer_obeys_its_processor_in_every_token(checkpoint):
    engine = Engine(checkpoint)
    settings = DecodingSettings(max_new_tokens=24, exact=False, tau=0.0)
    request = engine.add(PROMPTS[0], settings, logits_processors=[NoRepeatNGramLogitsProcessor(2)])
    for _ in engine.stream():
        pass
    result = engine.result(request)
    said = PROMPTS[0] + result.token_ids
    pairs = list(itertools.pairwise(said))
    assert len(set(pairs)) == len(pairs)
    assert result.forwards < len(result.token_ids)


def test_penalties_come_before_processors_and_the_temperature_after_them(checkpoint):
    seen = []

    def record(input_ids, scores):
        seen.append((input_ids.tolist()[0], scores[0, 60:80].clone()))
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([70]), 0.0)

    settings = DecodingSettings(
        tau=1.0, max_new_tokens=3, temperature=0.7, seed=1, bad_words_ids=((61,),), repetition_penalty=2.0
    )
    engine = Engine(checkpoint)
    request = engine.add([5, 6, 7], settings, logits_processors=[record])
    for _ in engine.stream():
        pass
    assert engine.result(request).token_ids == [70, 70, 70]
    assert [ids for ids, _ in seen] == [[5, 6, 7], [5, 6, 7, 70], [5, 6, 7, 70, 70]]  # once a token
    assert all(scores[1] == -torch.inf for _, scores in seen)
    plain = checkpoint.model(input_ids=torch.tensor([[5, 6, 7, 70]])).logits[0, -1].float()
    penalised = plain[70] / 2 if plain[70] > 0 else plain[70] * 2
    torch.testing.assert_close(seen[1][1][10], penalised)


@pytest.mark.parametrize("mode", [*MODES, "lossy"])
def test_a_request_that_leaves_no_token_ends_alone_behind_what_it_could_say(checkpoint, mode):
    """Ten tokens, then none: what one-token steps would give, whatever guesses meet the wall earlier."""
    settings = DecodingSettings(max_new_tokens=24, **MODES.get(mode, {"exact": False, "tau": 0.0}))
    prompt = PROMPTS[0]

    def wall(input_ids, scores):
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] >= len(prompt) + 10 else scores

    engine = Engine(checkpoint, max_rows=2)
    stuck, other = engine.add(prompt, settings, logits_processors=[wall]), engine.add(prompt, settings)
    for _ in engine.stream():
        pass
    result, whole = engine.result(stuck), engine.result(other)
    assert result.finish_reason == "error"
    assert "No token was left" in result.error
    assert "NaN" not in result.error
    assert result.token_ids == whole.token_ids[:10]
    assert whole.finish_reason != "error"


def test_bans_on_every_token_are_told_as_such(checkpoint):
    everything = tuple((token,) for token in range(320))
    (result,) = generate(checkpoint, [[5, 6]], DecodingSettings(bad_words_ids=everything))
    assert (result.finish_reason, result.token_ids) == ("error", [])
    assert "No token was left" in result.error


def test_a_budget_that_ends_at_the_wall_is_no_error(checkpoint):
    def wall(input_ids, scores):
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] >= 3 + 6 else scores

    engine = Engine(checkpoint)
    request = engine.add([5, 6, 7], DecodingSettings(max_new_tokens=6), logits_processors=[wall])
    for _ in engine.stream():
        pass
    result = engine.result(request)
    assert result.finish_reason in ("length", "stop")


def test_a_processor_that_gives_no_scores_is_named(checkpoint):
    class Forgetful:
        def __call__(self, input_ids, scores):
            scores[:, 3] = 0

    engine = Engine(checkpoint)
    engine.add([5, 6], DecodingSettings(max_new_tokens=2), logits_processors=[Forgetful()])
    with pytest.raises(MarsError, match=r"Forgetful gave NoneType, expected scores of shape \[1, 320\]"):
        engine.step()
