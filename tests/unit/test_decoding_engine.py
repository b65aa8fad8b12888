"""The engine against transformers' greedy search and against the SPEC's sentences, on tiny random models."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import threading

import pytest
import torch

from decoding_reference import biased, hf_greedy, reference
from mars_lm.checkpoint import Checkpoint, end_token_ids
from mars_lm.decoding import Engine, GenerationResult, generate
from mars_lm.decoding.forward import ATTENTION, ModelForward, attention_of
from mars_lm.settings import DecodingSettings as AnySettings
from tiny import FAMILIES, tiny_checkpoint

# The reference places every mask. How many of them pay is the subject of test_decoding_width.py.
DecodingSettings = functools.partial(AnySettings, adaptive=False)

CONTEXT = 96
SETTINGS = {
    "one-token": DecodingSettings(tau=1.0),
    "exact": DecodingSettings(),
    "exact, no recovery": DecodingSettings(recovery=False),
    "exact, careful": DecodingSettings(tau=0.4),
    "exact, margin": DecodingSettings(tau=0.3, rule="margin"),
    "exact, entropy": DecodingSettings(tau=1.2, rule="entropy"),
    "exact, B=2": DecodingSettings(block_size=2),
    "exact, B=3, no recovery": DecodingSettings(block_size=3, recovery=False),
    "exact, B=1": DecodingSettings(block_size=1),
    "lossy": DecodingSettings(tau=0.4, exact=False),
    "lossy, all": DecodingSettings(tau=0.0, exact=False),
    "lossy, margin": DecodingSettings(tau=0.2, rule="margin", exact=False),
    "lossy, entropy": DecodingSettings(tau=1.5, rule="entropy", exact=False),
    "lossy, one-token": DecodingSettings(tau=1.0, exact=False),
}


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 300) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return biased(tiny_checkpoint(max_position_embeddings=CONTEXT))


def assert_as_reference(
    checkpoint: Checkpoint, prompt: list[int], settings: DecodingSettings, result, context
):
    expected = reference(checkpoint, prompt, settings, context)
    assert result.token_ids == expected.token_ids
    assert result.accepted_lengths == expected.accepted_lengths
    assert result.finish_reason == expected.finish_reason
    assert result.rejected_drafts == expected.rejected_drafts
    assert result.forwards == len(expected.accepted_lengths)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_mode_decodes_as_the_spec_says(checkpoint, name):
    settings = dataclasses.replace(SETTINGS[name], max_new_tokens=30)
    prompts = prompts_of(3, 17, 1, 40, 9)
    results = generate(checkpoint, prompts, settings, max_rows=3)
    for prompt, result in zip(prompts, results, strict=True):
        assert_as_reference(checkpoint, prompt, settings, result, CONTEXT)
        if settings.exact or settings.one_token:
            assert result.token_ids == hf_greedy(checkpoint, prompt, 30)
    if settings.one_token:
        assert all(result.forwards == len(result.token_ids) for result in results)
    else:  # the test would be empty if nothing were ever accepted, or all
        lengths = [length for result in results for length in result.accepted_lengths]
        assert max(lengths) > 1
        if settings.exact:
            assert sum(result.rejected_drafts for result in results) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_family_says_what_transformers_says(family, kv_heads):
    checkpoint = biased(tiny_checkpoint(family, num_key_value_heads=kv_heads, seed=3))
    prompts = prompts_of(4, 13, 70, seed=1)
    wanted = [hf_greedy(checkpoint, prompt, 20) for prompt in prompts]
    for settings in (DecodingSettings(max_new_tokens=20), DecodingSettings(max_new_tokens=20, tau=1.0)):
        results = generate(checkpoint, prompts, settings)
        assert [result.token_ids for result in results] == wanted
        for prompt, result in zip(prompts, results, strict=True):
            assert_as_reference(checkpoint, prompt, settings, result, 256)


def test_a_longer_block_than_four(checkpoint):
    eight = biased(tiny_checkpoint(block_size=8))
    prompt = prompts_of(12)[0]
    for settings in (DecodingSettings(max_new_tokens=40), DecodingSettings(max_new_tokens=40, exact=False)):
        assert_as_reference(eight, prompt, settings, generate(eight, [prompt], settings)[0], 256)


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_requests_and_arrivals_gives_each_its_lone_tokens(checkpoint, seed):
    rng = random.Random(seed)
    engine = Engine(checkpoint, max_rows=rng.choice([1, 2, 3, 5]), prefill_chunk=rng.choice([4, 70, 512]))
    coming = []
    for length in (1, 5, 30, 70, 80, 94, 12):
        settings = rng.choice(list(SETTINGS.values()))
        budget = rng.choice([1, 2, 3, 7, 25, 500])  # the longest ends at the context's edge, inside a window
        coming.append(
            (prompts_of(length, seed=seed)[0], dataclasses.replace(settings, max_new_tokens=budget))
        )
    asked, cancelled = {}, set()
    while coming or engine.has_work:
        if coming and rng.random() < 0.4:
            prompt, settings = coming.pop()
            asked[engine.add(prompt, settings)] = prompt, settings
        engine.step()
        if asked and rng.random() < 0.05:
            cancelled.add(rng.choice(list(asked)))
            engine.cancel(max(cancelled))
    for request, (prompt, settings) in asked.items():
        result = engine.result(request)
        if result.finish_reason == "cancelled":
            expected = reference(checkpoint, prompt, settings, CONTEXT).token_ids
            assert result.token_ids == expected[: len(result.token_ids)]
        else:
            assert_as_reference(checkpoint, prompt, settings, result, CONTEXT)


def test_outputs_of_each_step_make_up_the_result(checkpoint):
    engine = Engine(checkpoint, max_rows=2)
    requests = [engine.add(prompt, DecodingSettings(max_new_tokens=20)) for prompt in prompts_of(5, 8, 3)]
    seen: dict[int, list[int]] = {request: [] for request in requests}
    lengths: dict[int, list[int]] = {request: [] for request in requests}
    reasons = {}
    for output in engine.stream():
        seen[output.request_id] += output.new_token_ids
        lengths[output.request_id].append(len(output.new_token_ids))
        if output.finish_reason:
            reasons[output.request_id] = output.finish_reason
    for request in requests:
        result = engine.result(request)
        assert (seen[request], lengths[request]) == (result.token_ids, result.accepted_lengths)
        assert reasons[request] == result.finish_reason
        assert result.prefill_seconds > 0
        assert result.decode_seconds > 0
    assert not engine.has_work
    assert engine.step() == []


def first_seen_inside_a_run(result: GenerationResult) -> list[int]:
    """Tokens whose first appearance was followed by another token of the same forward."""
    found, begin = [], 0
    for length in result.accepted_lengths:
        found += [
            t
            for i, t in enumerate(result.token_ids[begin : begin + length - 1], begin)
            if t not in result.token_ids[:i]
        ]
        begin += length
    return found


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("where", ["number", "list", "tokenizer"])
def test_an_end_token_inside_an_accepted_run_cuts_it_there(where, exact):
    checkpoint = biased(tiny_checkpoint(seed=1), range(7, 60))
    settings = DecodingSettings(max_new_tokens=40, exact=exact)
    prompts = prompts_of(3, 17, 1, 40, 9, 25)
    before = generate(checkpoint, prompts, settings)
    number, end = next(
        (number, end) for number, result in enumerate(before) for end in first_seen_inside_a_run(result)
    )
    if where == "number":
        checkpoint.model.generation_config.eos_token_id = end
    elif where == "list":
        checkpoint.model.generation_config.eos_token_id = [2, end]
    else:
        checkpoint.tokenizer.eos_token = checkpoint.tokenizer.convert_ids_to_tokens(end)
    assert end in end_token_ids(checkpoint)
    results = generate(checkpoint, prompts, settings)
    cut = before[number].token_ids[: before[number].token_ids.index(end) + 1]
    assert results[number].token_ids == cut
    assert results[number].finish_reason == "stop"
    for prompt, result in zip(prompts, results, strict=True):
        assert_as_reference(checkpoint, prompt, settings, result, 256)


@pytest.mark.parametrize("budget", range(1, 9))
def test_no_budget_is_overrun(checkpoint, budget):
    prompts = prompts_of(3, 17, 40)
    for settings in SETTINGS.values():
        own = dataclasses.replace(settings, max_new_tokens=budget)
        for result in generate(checkpoint, prompts, own):
            assert len(result.token_ids) <= budget
            assert result.finish_reason == "length" or len(result.token_ids) <= budget


def fed_into(engine: Engine) -> list[list[int]]:
    """Record what the engine feeds into its model from now on."""
    fed: list[list[int]] = []
    run = engine._model.decode

    def recording(batch, *rest):
        fed.append(batch.input_ids.tolist())
        return run(batch, *rest)

    engine._model.decode = recording
    return fed


def test_one_token_mode_feeds_one_token_a_row_and_no_mask(checkpoint):
    engine = Engine(checkpoint, max_rows=3)
    for prompt in prompts_of(4, 4, 4):
        engine.add(prompt, DecodingSettings(tau=1.0, max_new_tokens=6))
    fed = fed_into(engine)
    for _ in engine.stream():
        pass
    assert [len(ids) for ids in fed] == [12, 3, 3, 3, 3, 3]
    assert checkpoint.mars.mask_token_id not in itertools.chain(*fed)


def test_what_a_forward_feeds(checkpoint):
    """SPEC 3 and 4, token by token: pending, draft and masks, and no mask past what can be committed."""
    engine = Engine(checkpoint, max_rows=1)
    mask = checkpoint.mars.mask_token_id
    prompt = prompts_of(4)[0]
    request = engine.add(prompt, DecodingSettings(max_new_tokens=6, recovery=False))
    fed = fed_into(engine)
    engine.step()
    assert fed[0] == [*prompt, mask, mask, mask]
    while engine.has_work:
        engine.step()
        left = 6 - sum(engine._requests[request].result.accepted_lengths[:-1])
        draft = [token for token in fed[-1][1:] if token != mask]
        masks = fed[-1].count(mask)
        assert fed[-1] == [fed[-1][0], *draft, *[mask] * masks]
        assert masks == max(0, min(3, left - len(draft) - 2))


def test_rows_do_not_wait_for_a_long_prompt(checkpoint):
    engine = Engine(checkpoint, max_rows=2, prefill_chunk=10)
    first = engine.add(prompts_of(3)[0], DecodingSettings(tau=1.0, max_new_tokens=30))
    engine.step()
    late = engine.add(prompts_of(80)[0], DecodingSettings(tau=1.0, max_new_tokens=5))
    ids = [[output.request_id for output in engine.step()] for _ in range(4)]
    assert ids == [[first]] * 4
    for _ in engine.stream():
        pass
    assert engine.result(late).token_ids == hf_greedy(checkpoint, prompts_of(80)[0], 5)


def test_a_model_that_scales_its_logits_outside_its_head():
    from transformers import CohereConfig, CohereForCausalLM

    plain = tiny_checkpoint()
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=plain.tokenizer.eos_token_id,
        logit_scale=0.25,
    )
    checkpoint = Checkpoint(CohereForCausalLM(config).eval(), plain.tokenizer, plain.mars)
    prompt = prompts_of(9)[0]
    settings = DecodingSettings(tau=0.01, exact=False, max_new_tokens=20)
    assert_as_reference(checkpoint, prompt, settings, generate(checkpoint, [prompt], settings)[0], 256)
    assert not Engine(checkpoint)._model._plain_head
    assert Engine(plain)._model._plain_head


def test_the_model_generates_as_before_beside_an_engine(checkpoint):
    prompt = prompts_of(9)[0]
    before = hf_greedy(checkpoint, prompt, 10)
    engine = Engine(checkpoint)
    engine.add(prompt, DecodingSettings(max_new_tokens=10))
    engine.step()
    assert hf_greedy(checkpoint, prompt, 10) == before
    assert checkpoint.model.config._attn_implementation == "sdpa"
    for _ in engine.stream():
        pass


def test_results_of_settings_for_each_prompt(checkpoint):
    prompts = prompts_of(3, 5)
    settings = [DecodingSettings(max_new_tokens=3), DecodingSettings(max_new_tokens=7, tau=1.0)]
    results = generate(checkpoint, prompts, settings)
    assert [len(result.token_ids) for result in results] == [3, 7]
    assert all(isinstance(result, GenerationResult) for result in results)
    assert generate(checkpoint, [], DecodingSettings()) == []


def test_a_model_that_is_changed_for_a_forward_is_kept_from_other_threads():
    """Else one thread's end gives another's forward, or the model for ever, an attention not its own."""
    model = tiny_checkpoint().model
    config = model.config
    before, inside = config._attn_implementation, threading.Event()

    def another_engine() -> None:
        with attention_of(model, "eager"):
            inside.set()

    thread = threading.Thread(target=another_engine)
    with attention_of(model, ATTENTION):
        thread.start()
        assert not inside.wait(0.3)
        ModelForward(model, 1, 8)  # the thread itself may go on
        assert config._attn_implementation == ATTENTION
    thread.join()
    assert inside.is_set()
    assert config._attn_implementation == before
