"""A prompt's beginning is prefilled once, and nobody can tell from the text."""

from __future__ import annotations

import random

import pytest

from mars_lm.decoding import Engine
from mars_lm.decoding.engine import WORTH_WAITING
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint

SETTINGS = DecodingSettings(max_new_tokens=8, ignore_eos=True, adaptive=False)


@pytest.fixture(params=["torch", "native"])
def engine_of(request):
    """Engines over one model, on either forward."""
    checkpoint = tiny_checkpoint("llama", head_dim=16, seed=1)

    def make(**options) -> Engine:
        engine = Engine(checkpoint, kernels=request.param if options.pop("any", True) else "auto", **options)
        engine.fed = []
        run = engine._model.decode

        def recording(feed, *rest):
            engine.fed.append(len(feed.input_ids))
            return run(feed, *rest)

        engine._model.decode = recording
        return engine

    if request.param == "native":
        pytest.importorskip("mars_lm.decoding.native.forward")
        try:
            make()
        except Exception as error:  # no compiler here
            pytest.skip(str(error))
    return make


def words(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300) for _ in range(count)]


def finish(engine: Engine) -> None:
    for _ in engine.stream():
        pass


def lone(make, prompt: list[int]) -> list[int]:
    engine = make(max_rows=1, share_prefixes=False)
    number = engine.add(prompt, SETTINGS)
    finish(engine)
    return engine.result(number).token_ids


def test_a_prefix_of_a_running_row_is_copied_and_the_text_is_the_same(engine_of):
    system = words(100, 0)
    prompts = [system + words(5 + i, i + 1) for i in range(4)]
    engine = engine_of(max_rows=4)
    numbers = [engine.add(prompt, SETTINGS) for prompt in prompts]
    finish(engine)
    results = [engine.result(number) for number in numbers]
    assert [r.token_ids for r in results] == [lone(engine_of, prompt) for prompt in prompts]
    assert [r.shared_prompt_tokens for r in results] == [0, 100, 100, 100]
    assert engine.fed[0] < 100 + 5 + 4  # the first prompt alone ...
    assert max(engine.fed[1:]) < 100  # ... and never its beginning again


def test_a_row_that_has_ended_still_lends_its_beginning(engine_of):
    """As the next turn of a chat: the earlier prompt, its answer and a new question."""
    engine = engine_of(max_rows=2)
    prompt = words(40, 5)
    first = engine.add(prompt, SETTINGS)
    finish(engine)
    answer = engine.result(first).token_ids
    again = prompt + answer + words(6, 6)
    second = engine.add(again, SETTINGS)
    finish(engine)
    result = engine.result(second)
    assert result.token_ids == lone(engine_of, again)
    assert result.shared_prompt_tokens >= len(prompt)


def test_the_same_prompt_again_is_not_prefilled_again(engine_of):
    engine = engine_of(max_rows=3)
    prompt = words(WORTH_WAITING + 20, 7)
    numbers = [engine.add(prompt, SETTINGS) for _ in range(3)]
    finish(engine)
    texts = [engine.result(number).token_ids for number in numbers]
    assert texts == [lone(engine_of, prompt)] * 3
    assert sum(engine.fed) < 2 * len(prompt) + 3 * 8 * 16


def test_random_schedules_with_common_beginnings_give_each_its_lone_text(engine_of):
    draw = random.Random(0)
    stems = [words(n, n) for n in (20, 50, 90)]
    for _ in range(6):
        engine = engine_of(max_rows=3, prefill_chunk=draw.choice([16, 64, 512]))
        running, expected = {}, {}
        for _ in range(30):
            if draw.random() < 0.5:
                prompt = draw.choice(stems)[: draw.randrange(10, 91)] + words(draw.randrange(1, 9), 0)
                number = engine.add(prompt, SETTINGS)
                running[number] = prompt
            if running and draw.random() < 0.15:
                gone = draw.choice(sorted(running))
                engine.cancel(gone)
                del running[gone]
            engine.step()
        finish(engine)
        for number, prompt in running.items():
            expected = lone(engine_of, prompt)
            assert engine.result(number).token_ids == expected


def test_a_row_that_broke_lends_nothing():
    import torch

    checkpoint = tiny_checkpoint("llama", tied=False)
    with torch.no_grad():
        checkpoint.model.get_input_embeddings().weight[8] = float("nan")
    engine = Engine(checkpoint, max_rows=1)
    broken = engine.add([*words(30, 9), 8, 5], SETTINGS)
    finish(engine)
    assert engine.result(broken).finish_reason == "error"
    number = engine.add([*words(30, 9), 4, 5], SETTINGS)
    finish(engine)
    result = engine.result(number)
    assert result.finish_reason == "length"
    assert result.shared_prompt_tokens == 0
