"""A thousand random schedules: adds, cancels, live changes, all settings, lengths at the context's edge."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decoding_reference import FixedCost, biased
from mars_lm.checkpoint import Checkpoint
from mars_lm.decoding import Engine, GenerationResult
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint

CONTEXT = 48
SCHEDULES = 1000  # on the two models together
VOCABULARY = 300


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model gains nothing from a second thread, and on a busy machine waits for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["kernels", "modules"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    """A model that the C kernels run, and one of heads too small for them."""
    size = {"kernels": 16, "modules": 8}[request.param]
    return biased(tiny_checkpoint(max_position_embeddings=CONTEXT, head_dim=size))


def random_settings(draw: random.Random) -> DecodingSettings:
    """One value, often the neutral one, of every setting that there is."""
    rule = draw.choice(["probability", "probability", "margin", "entropy"])
    exact = draw.random() < 0.6
    budget = draw.choice([1, 2, 5, 12, 30, 30, 500])  # the longest meets the context's end inside a window
    values: dict[str, Any] = {
        "tau": draw.choice([0.0, 0.0, 0.3, 0.7, 1.0]),
        "rule": rule,
        "block_size": draw.choice([None, None, 1, 2, 3]),
        "exact": exact,
        "recovery": draw.random() < 0.7,
        # A lossy text may depend on the load only where that was asked for.
        "adaptive": draw.choice([None, True, True, False] if exact else [None, False]),
        "max_new_tokens": budget,
        "min_new_tokens": draw.choice([0, 0, 0, min(4, budget)]),
        "ignore_eos": draw.random() < 0.2,
        "stop_token_ids": draw.choice([(), (), (66, 71)]),
        "stop": draw.choice([(), (), ("a",), ("e ", "th")]),
        "bad_words_ids": draw.choice([(), (), ((70,), (65, 66))]),
        "logprobs": draw.choice([None, None, 0, 2]),
        "repetition_penalty": draw.choice([1.0, 1.0, 1.3]),
        "presence_penalty": draw.choice([0.0, 0.0, 0.7]),
        "frequency_penalty": draw.choice([0.0, 0.0, -0.4]),
        "seed": draw.randrange(2**40),
    }
    if draw.random() < 0.4:
        values |= {
            "temperature": draw.choice([0.5, 1.0, 2.0]),
            "top_k": draw.choice([0, 0, 7]),
            "top_p": draw.choice([1.0, 1.0, 0.9]),
            "min_p": draw.choice([0.0, 0.0, 0.05]),
        }
    return DecodingSettings(**values)


@pytest.fixture(scope="module")
def pool(checkpoint: Checkpoint) -> list[tuple[list[int], DecodingSettings, GenerationResult]]:
    """Requests, and what each gives alone."""
    draw = random.Random(0)
    engine = Engine(checkpoint, max_rows=1, share_prefixes=False)
    assert engine._width is not None
    engine._width.cost = FixedCost({1: 1.0, 8: 1.0, 32: 1.0})  # every mask pays
    few = [draw.randrange(5, VOCABULARY) for _ in range(CONTEXT)]
    made = []
    for number in range(300):
        length = draw.choice([1, 3, 9, 9, 14, 20, 33, CONTEXT - 3, CONTEXT - 1])
        # Two in three share a beginning with the others, as prompts with one system message do.
        shared = min(length, draw.choice([0, 17, 40]))
        prompt = few[:shared] + [draw.randrange(5, VOCABULARY) for _ in range(length - shared)]
        settings = random_settings(random.Random(number))
        request = engine.add(prompt, settings)
        for _ in engine.stream():
            pass
        alone = engine.result(request)
        made.append((prompt, settings, alone))
    # Else the test would be empty.
    assert {result.finish_reason for _, _, result in made} == {"stop", "length"}
    assert sum(len(result.accepted_lengths) < len(result.token_ids) for _, _, result in made) > 30
    return made


def check(result: GenerationResult, alone: GenerationResult, settings: DecodingSettings) -> None:
    assert result.error is None
    assert result.token_ids == alone.token_ids
    assert (result.text, result.finish_reason) == (alone.text, alone.finish_reason)
    assert sum(result.accepted_lengths) == len(result.token_ids)
    if settings.logprobs is not None:
        assert result.logprobs is not None
        assert alone.logprobs is not None
        assert [said.token_id for said in result.logprobs] == alone.token_ids
        for said, wanted in zip(result.logprobs, alone.logprobs, strict=True):
            assert said.logprob == pytest.approx(wanted.logprob, abs=1e-4)


@pytest.mark.parametrize("part", range(5))
def test_any_schedule_leaks_no_row_starves_none_and_gives_each_its_lone_answer(checkpoint, pool, part):
    for number in range(part * SCHEDULES // 10, (part + 1) * SCHEDULES // 10):
        run_schedule(checkpoint, pool, random.Random(number))


def run_schedule(checkpoint: Checkpoint, pool: Any, draw: random.Random) -> None:
    engine = Engine(
        checkpoint,
        max_rows=draw.choice([1, 2, 3, 5, 8]),
        prefill_chunk=draw.choice([5, 16, 512]),
        share_prefixes=draw.random() < 0.7,
    )
    coming = draw.sample(pool, draw.randrange(2, 8))
    asked: dict[int, Any] = {}
    texts: dict[int, str] = {}
    cancelled: set[int] = set()
    over: set[int] = set()
    admitted: list[int] = []
    steps, patience = 0, 0
    while coming or engine.has_work:
        while coming and draw.random() < 0.5:
            prompt, settings, alone = coming.pop()
            request = engine.add(prompt, settings)
            asked[request] = settings, alone
            patience += len(prompt) + min(settings.max_new_tokens, CONTEXT) + 1
        running = sorted(set(asked) - over)
        if running and draw.random() < 0.04:
            victim = draw.choice(running)
            engine.cancel(victim)
            cancelled.add(victim)
            over.add(victim)
        if running and draw.random() < 0.2:
            turned = draw.choice(running)
            settings = asked[turned][0]
            if settings.exact and not settings.one_token:  # there no knob moves the text
                tau = draw.choice([0.0, 0.2, 0.9])
                engine.update(turned, tau=tau, adaptive=draw.random() < 0.5, recovery=draw.random() < 0.5)
        assert engine._width is not None
        slope = draw.choice([0.0, 0.05, 5.0])
        engine._width.cost = FixedCost({n: 1 + slope * n for n in (1, 8, 32)})
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            if output.finish_reason is not None:
                over.add(output.request_id)
        at_work = [request.id for request in engine._row_of if request is not None]
        admitted += sorted(set(at_work) - set(admitted))
        steps += 1
        assert steps <= patience + len(asked) + 100, "a row starves"
    for request, (settings, alone) in asked.items():
        result = engine.result(request)
        if request in cancelled:
            assert alone.token_ids[: len(result.token_ids)] == result.token_ids
        else:
            check(result, alone, settings)
            assert texts.get(request, "") == alone.text
    # Rows are given in the order of arrival, all are free again, and nothing is remembered.
    assert admitted == sorted(admitted)
    assert (engine.running, engine.waiting, engine.cache_use) == (0, 0, 0.0)
    assert not engine._requests


def test_the_schedules_draw_every_setting():
    fields = {field.name: field for field in dataclasses.fields(DecodingSettings)}
    drawn = [random_settings(random.Random(number)) for number in range(300)]
    for name, field in fields.items():
        assert any(getattr(settings, name) != field.default for settings in drawn), name
