"""Block-level commit and no cache: slower ways to the same text, as the paper has them (SPEC 5)."""

from __future__ import annotations

import random

import pytest

from mars_lm.decoding import Engine
from mars_lm.decoding.width import AdaptiveWidth
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint():
    return tiny_checkpoint("llama", seed=5)


def decode(checkpoint, prompts, settings, **options):
    """The texts, and what each forward fed."""
    engine = Engine(checkpoint, **{"max_rows": 3, **options})
    fed, run = [], engine._model.decode

    def recording(feed, *rest):
        fed.append(feed.width.tolist())
        return run(feed, *rest)

    engine._model.decode = recording
    numbers = [engine.add(prompt, settings) for prompt in prompts]
    for _ in engine.stream():
        pass
    return [engine.result(number).token_ids for number in numbers], fed


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(300) for _ in range(draw.randrange(2, 20))] for _ in range(count)]


@pytest.mark.parametrize("commit_block", [0, 1, 4, 7, 64])
@pytest.mark.parametrize(
    "mode",
    [
        {"tau": 1.0},
        {"tau": 0.0},
        {"tau": 0.0, "recovery": False},
        {"tau": 0.0, "temperature": 0.9, "seed": 3},
    ],
)
def test_exact_and_one_token_texts_do_not_depend_on_when_the_cache_grows(checkpoint, commit_block, mode):
    settings = DecodingSettings(max_new_tokens=21, ignore_eos=True, adaptive=False, **mode)
    expected, _ = decode(checkpoint, prompts(5), settings)
    got, _ = decode(checkpoint, prompts(5), settings, commit_block=commit_block)
    assert got == expected


def test_lossy_text_without_a_cache_is_the_windows(checkpoint):
    settings = DecodingSettings(tau=0.01, exact=False, max_new_tokens=21, ignore_eos=True)
    expected, _ = decode(checkpoint, prompts(5), settings)
    assert decode(checkpoint, prompts(5), settings, commit_block=0)[0] == expected


def test_a_block_is_fed_again_until_it_is_full(checkpoint):
    settings = DecodingSettings(tau=1.0, max_new_tokens=10, ignore_eos=True)
    _, fed = decode(checkpoint, [[1, 2, 3, 4, 5]], settings, commit_block=4)
    assert [width for [width] in fed] == [5, 1, 2, 3, 4, 1, 2, 3, 4, 1]
    _, fed = decode(checkpoint, [[1, 2, 3, 4, 5]], settings, commit_block=0)
    assert [width for [width] in fed] == list(range(5, 15))


def test_rows_wait_for_each_other_at_a_blocks_end(checkpoint):
    """One row says a token a forward, the other up to four: the block lasts as long as the slow one's."""
    slow = DecodingSettings(tau=1.0, max_new_tokens=12, ignore_eos=True)
    fast = DecodingSettings(max_new_tokens=12, ignore_eos=True, tau=0.0, exact=False)
    engine = Engine(checkpoint, max_rows=2, commit_block=6)
    numbers = [engine.add(prompts(1)[0], settings) for settings in (slow, fast)]
    while engine.has_work:
        engine.step()
        lengths = [len(engine._requests[number].result.token_ids) for number in numbers]
        assert lengths[1] <= lengths[0] // 6 * 6 + 6
    assert [len(engine.result(number).token_ids) for number in numbers] == [12, 12]


def test_rows_go_on_when_the_one_that_they_wait_for_is_cancelled(checkpoint):
    slow = DecodingSettings(tau=1.0, max_new_tokens=40, ignore_eos=True)
    fast = DecodingSettings(max_new_tokens=40, ignore_eos=True, tau=0.0, exact=False)
    waited = 0
    for forwards in range(1, 10):
        engine = Engine(checkpoint, max_rows=2, commit_block=5)
        quick, other = (engine.add(prompts(1)[0], settings) for settings in (fast, slow))
        for _ in range(forwards):
            engine.step()
        state = engine._state
        waited += (state.length >= state.fence).tolist() == [True, False]
        engine.cancel(other)
        for _ in range(60):
            engine.step()
        assert engine.result(quick).finish_reason == "length"
    assert waited  # or nothing was shown


@pytest.mark.parametrize("commit_block", [None, 0, 4])
def test_masks_are_priced_beside_what_every_forward_feeds(checkpoint, commit_block, monkeypatch):
    """A prompt is a cost of one forward, unless there is no cache: then it is a cost of each."""
    engine = Engine(checkpoint, max_rows=1, commit_block=commit_block, prefill_chunk=8)
    seen, choose = [], AdaptiveWidth.choose

    def recording(width, *arguments, **options):
        seen.append(options["prompt"])
        return choose(width, *arguments, **options)

    monkeypatch.setattr(AdaptiveWidth, "choose", recording)
    engine.add(list(range(20)), DecodingSettings(max_new_tokens=12, ignore_eos=True))
    for _ in engine.stream():
        pass
    prefills = [19] if commit_block == 0 else [3]  # the last chunk, that masks follow
    assert seen[: len(prefills)] == prefills
    assert len(seen) > len(prefills)
    assert not any(seen[len(prefills) :])


def test_a_negative_block_is_refused(checkpoint):
    with pytest.raises(MarsError, match="commit_block is -1"):
        Engine(checkpoint, commit_block=-1)
