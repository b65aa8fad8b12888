"""`Engine(invariant=True)` on transformers' modules: the same bits, and so the same text, in any company."""

from __future__ import annotations

import random

import pytest
import torch

import mars_lm
from decoding_reference import feed
from mars_lm.checkpoint import Checkpoint
from mars_lm.decoding import Engine
from mars_lm.decoding.executors import make_forward
from mars_lm.decoding.forward import Feed, ModelForward
from mars_lm.decoding.invariant import KEYS, InvariantForward
from mars_lm.settings import DecodingSettings
from tiny import FAMILIES, tiny_checkpoint

KINDS: dict[str, dict] = {
    **{family: {} for family in FAMILIES},
    "llama, a head for each query": {"num_key_value_heads": 4},
    "llama, three heads share a key": {"hidden_size": 48, "num_attention_heads": 6},
    "llama, more heads share a key than fit a piece": {
        "hidden_size": 136,
        "num_attention_heads": 17,
        "num_key_value_heads": 1,
    },
    "llama, sizes that fill no vector": {"hidden_size": 40, "intermediate_size": 50},
}


def checkpoint_of(kind: str, dtype: torch.dtype, seed: int = 0, **overrides) -> Checkpoint:
    made = tiny_checkpoint(kind.split(",")[0], seed=seed, **{**KINDS[kind], **overrides})
    made.model.to(dtype)
    return made


def others(forward_class, checkpoint: Checkpoint, length: int, trials: int) -> int:
    """Tokens of a text whose logits have other bits than when it is decoded alone, one token a forward.

    In each trial the text is cut at random and fed between rows of random tokens, and its logits are computed
    a few at a time: the worst trial counts.
    """
    draw = random.Random(0)
    ids = [draw.randrange(300) for _ in range(length)]
    worst = 0
    with torch.inference_mode():
        alone = forward_class(checkpoint.model, 1, length)
        expected = torch.cat([alone.logits(alone.hidden(feed((0, [t], i)))) for i, t in enumerate(ids)])
        for _ in range(trials):
            forward, at, beside, seen = forward_class(checkpoint.model, 3, length + 20), 0, 0, []
            while at < length:
                size = min(draw.choice([1, 2, 3, 5, 8, 13, 16, 21, 34]), length - at)
                before, after = ([draw.randrange(300) for _ in range(draw.choice([1, 2, 19]))] for _ in "ab")
                here = feed((0, before, beside), (1, ids[at : at + size], at), (2, after, 0))
                seen.append(forward.hidden(here)[len(before) : len(before) + size])
                at, beside = at + size, (beside + len(before)) % 40
            logits = [forward.logits(part) for part in torch.cat(seen).split(draw.choice([1, 3, 8, 11]))]
            worst = max(worst, int((torch.cat(logits) != expected).any(dim=1).sum()))
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_bit_equal_in_any_company(kind, dtype):
    """Rows beside it, the place among them, the cut of its prompt, the number of logits: no bit changes."""
    assert others(InvariantForward, checkpoint_of(kind, dtype), 50, trials=3) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_text_is_too(dtype):
    """Its keys fill more than one of the blocks in which attention reads them."""
    kind = checkpoint_of("llama", dtype, max_position_embeddings=2 * KEYS)
    assert others(InvariantForward, kind, KEYS + 30, trials=1) == 0


def test_the_plain_forward_is_not():
    """Or all this would be for nothing."""
    assert others(ModelForward, checkpoint_of("llama", torch.float32), 50, trials=3) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_same(family):
    """Padding, passes and pieces of attention change no more than the last bits."""
    made = checkpoint_of(family, torch.float32)
    ids = torch.randint(0, 300, (1, 70), generator=torch.Generator().manual_seed(1))
    forward = InvariantForward(made.model, 2, 100)
    with torch.inference_mode():
        expected = made.model(ids).logits[0]
        logits = forward.logits(forward.hidden(Feed.of_one_row(ids[0].numpy())))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def texts(checkpoint: Checkpoint, prompts, settings: DecodingSettings, **options) -> list[list[int]]:
    engine = Engine(checkpoint, kernels="torch", **options)
    requests = [engine.add(prompt, settings) for prompt in prompts]
    for _ in engine.stream():
        pass
    return [engine.result(request).token_ids for request in requests]


def alone_and_together(checkpoint: Checkpoint, seed: int, recovery: bool, *, invariant: bool):
    """One-token mode, each prompt by itself; exact mode, all together with their prompts in chunks."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(300) for _ in range(draw.randrange(1, 40))] for _ in range(5)]
    one = DecodingSettings(tau=1.0, max_new_tokens=40, ignore_eos=True)
    exact = DecodingSettings(max_new_tokens=40, ignore_eos=True, recovery=recovery, adaptive=False)
    alone = [texts(checkpoint, [prompt], one, max_rows=1, invariant=invariant)[0] for prompt in prompts]
    return alone, texts(checkpoint, prompts, exact, max_rows=3, prefill_chunk=24, invariant=invariant)


@pytest.mark.parametrize("recovery", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "phi"])
def test_exact_mode_in_bfloat16_says_what_one_token_mode_says(family, recovery):
    for seed in range(2):
        made = checkpoint_of(family, torch.bfloat16, seed)
        alone, together = alone_and_together(made, seed, recovery, invariant=True)
        assert together == alone


def test_without_it_some_of_these_texts_part():
    parted = 0
    for seed in range(6):
        alone, together = alone_and_together(
            checkpoint_of("llama", torch.bfloat16, seed), seed, True, invariant=False
        )
        parted += alone != together
    assert parted


def test_sampled_texts_and_those_on_shared_beginnings_are_the_same_too():
    made = checkpoint_of("llama", torch.bfloat16)
    head = list(range(5, 45))
    prompts = [[*head, token] for token in range(50, 56)]
    exact = DecodingSettings(max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=3)
    one = DecodingSettings(max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=3, tau=1.0)
    alone = [texts(made, [prompt], one, max_rows=1, invariant=True)[0] for prompt in prompts]
    assert texts(made, prompts, exact, max_rows=2, invariant=True) == alone


def test_transformers_generate_and_the_c_kernels_take_it():
    made = checkpoint_of("llama", torch.float32, head_dim=16)
    assert isinstance(make_forward(made.model, 1, 32, "torch", invariant=True), InvariantForward)
    ids = torch.tensor([[5, 6, 7]])
    plain = made.model.generate(ids, max_new_tokens=12, pad_token_id=0, custom_generate=mars_lm.generate)
    for kernels in ("auto", "torch"):
        again = made.model.generate(
            ids,
            max_new_tokens=12,
            pad_token_id=0,
            custom_generate=mars_lm.generate,
            kernels=kernels,
            invariant=True,
        )
        assert again.equal(plain)
