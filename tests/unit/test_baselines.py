"""Baselines: block diffusion against brute force, and drafters whose text must be AR's own."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from mars_lm.baselines.assisted import AssistedDecoder
from mars_lm.baselines.block_diffusion import BlockDiffusionDecoder
from mars_lm.baselines.jacobi import JacobiDecoder
from mars_lm.baselines.medusa import MedusaDecoder, MedusaHeads, load_heads, save_heads, train_heads
from mars_lm.checkpoint import end_token_ids
from mars_lm.decoding import generate
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings
from mars_lm.training.objective import compute_loss, preset
from mars_lm.training.streams import IGNORE, build
from tiny import tiny_checkpoint

VOCABULARY = 300


def prompts(count: int = 7, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(5, VOCABULARY) for _ in range(draw.choice([1, 2, 3, 4, 7, 9, 80]))]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def checkpoint():
    return tiny_checkpoint()


# -- block diffusion: training


def block_logits(checkpoint, clean: list[int], block: list[int]) -> torch.Tensor:
    """Brute force: the logits [B, V] of one block behind its clean tokens, with a mask written out."""
    length = len(clean) + len(block)
    seen = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        for key in range(length):
            if query < len(clean):
                seen[query, key] = key <= query
            else:
                seen[query, key] = True  # all clean tokens, and its own block both ways
    with torch.no_grad():
        logits = checkpoint.model(
            torch.tensor([clean + block]), attention_mask=seen[None, None], use_cache=False
        ).logits[0, len(clean) :]
    logits[:, checkpoint.mars.mask_token_id] = -torch.inf
    return logits


@pytest.mark.parametrize("block_size", [2, 4, 5])
def test_block_diffusions_loss_is_the_masked_tokens_own(checkpoint, block_size: int) -> None:
    draw = random.Random(block_size)
    mask = checkpoint.mars.mask_token_id
    ids = torch.tensor([[draw.randrange(5, VOCABULARY) for _ in range(19)] for _ in range(2)])
    labels = ids.clone()
    labels[0, :7], labels[1, :4] = IGNORE, IGNORE
    positions = torch.arange(19).expand(2, -1)
    objective = preset("block-diffusion", block_size=block_size)
    streams = build(
        ids,
        labels,
        torch.ones_like(ids),
        positions,
        mask_token_id=mask,
        block_size=block_size,
        layout=objective.layout,
        gaps=objective.gaps,
        seed=3,
    )
    model = checkpoint.model
    hidden = model.base_model(
        input_ids=streams.input_ids,
        position_ids=streams.position_ids,
        attention_mask=streams.dense_mask(),
        use_cache=False,
    ).last_hidden_state
    parts = compute_loss(hidden, model.get_output_embeddings(), streams, objective, 1.0, mask_token_id=mask)
    expected, masked = 0.0, 0
    for row in range(2):
        noisy = {
            int(p): int(t)
            for p, t, b in zip(
                streams.position_ids[row], streams.input_ids[row], streams.block[row], strict=True
            )
            if b > 0
        }
        for start in range(0, 19, block_size):
            places = range(start, min(start + block_size, 19))
            logits = block_logits(checkpoint, ids[row, :start].tolist(), [noisy[p] for p in places])
            hidden_places = [p for p in places if noisy[p] == mask]
            if any(labels[row, p] != IGNORE for p in places):
                assert hidden_places, "no block of the response goes without a mask"
            for place in places:
                if place in hidden_places:
                    expected -= float(logits[place - start].log_softmax(-1)[ids[row, place]])
                    masked += 1
                else:
                    assert noisy[place] == int(ids[row, place])
    assert int(parts.noisy_count) == masked
    assert float(parts.noisy_sum) == pytest.approx(expected, rel=1e-4)
    assert float(parts.loss.detach()) == pytest.approx(expected, rel=1e-4)  # and no AR loss beside it


# -- block diffusion: decoding


def reference(checkpoint, prompt: list[int], size: int, tau: float, rule: str, budget: int):
    """Brute force, without a cache: the tokens, and how many forwards they took."""
    mask, ends = checkpoint.mars.mask_token_id, end_token_ids(checkpoint)
    start = len(prompt) // size * size
    clean, block = prompt[:start], prompt[start:] + [mask] * (size - len(prompt) % size)
    given, text, forwards = len(prompt) - start, [], 0
    while True:
        logits = block_logits(checkpoint, clean, block)
        forwards += 1
        p = logits.softmax(-1)
        if rule == "probability":
            trust, passes = p.max(-1).values, lambda t: t >= tau and tau < 1
        elif rule == "margin":
            best = p.topk(2).values
            trust, passes = best[:, 0] - best[:, 1], lambda t: t >= tau
        else:
            trust, passes = (p * p.clamp_min(1e-30).log()).sum(-1), lambda t: -t <= tau
        masked = [i for i, token in enumerate(block) if token == mask]
        surest = max(masked, key=lambda i: float(trust[i]))
        for i in masked:
            if i == surest or passes(float(trust[i])):
                block[i] = int(logits[i].argmax())
        while given < size and block[given] != mask:
            text.append(block[given])
            given += 1
            if text[-1] in ends or len(text) == budget:
                return text, forwards
        if given == size:
            clean, block, given = clean + block, [mask] * size, 0


@pytest.mark.parametrize(
    ("rule", "tau"),
    [("probability", 1.0), ("probability", 0.05), ("probability", 0.0), ("margin", 0.02), ("entropy", 4.0)],
)
@pytest.mark.parametrize("size", [None, 3])
def test_block_diffusion_decodes_as_by_brute_force(checkpoint, rule: str, tau: float, size) -> None:
    asked = prompts(5)
    settings = DecodingSettings(tau=tau, rule=rule, block_size=size, exact=False, max_new_tokens=14)
    results = BlockDiffusionDecoder(checkpoint, max_rows=3)(asked, [settings] * len(asked))
    for prompt, result in zip(asked, results, strict=True):
        tokens, forwards = reference(checkpoint, prompt, size or 4, tau, rule, 14)
        assert result.token_ids == tokens
        assert result.forwards == forwards
        assert sum(result.accepted_lengths) == len(tokens)
        assert result.finish_reason == ("stop" if tokens[-1] in end_token_ids(checkpoint) else "length")


def test_block_diffusion_ends_at_an_end_token(checkpoint) -> None:
    """A model that says nothing but the end: every text is one token, however far its block was filled."""
    ending = tiny_checkpoint()
    end = min(end_token_ids(ending))
    head = nn.Linear(32, 320)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.bias[end] = 9.0
    ending.model.set_output_embeddings(head)
    asked = prompts(4)
    results = BlockDiffusionDecoder(ending)(asked, [DecodingSettings(tau=1.0, max_new_tokens=30)] * 4)
    assert {tuple(result.token_ids) for result in results} == {(end,)}
    forever = BlockDiffusionDecoder(ending)(
        asked, [DecodingSettings(tau=0.5, ignore_eos=True, max_new_tokens=9)] * 4
    )
    assert {tuple(result.token_ids) for result in forever} == {(end,) * 9}
    assert all(result.finish_reason == "length" for result in forever)


def test_block_diffusion_tokens_per_forward_lie_between_one_and_b(checkpoint) -> None:
    asked = [[7, 8, 9, 10]] * 2  # starts at a block's boundary
    one = DecodingSettings(tau=1.0, max_new_tokens=12, ignore_eos=True)
    slow, fast = (
        BlockDiffusionDecoder(checkpoint)(asked, [dataclasses.replace(one, tau=tau)] * 2)[0]
        for tau in (1.0, 0.0)
    )
    assert slow.forwards == 12
    assert fast.forwards == 3


def test_what_block_diffusion_cannot_do_is_told(checkpoint) -> None:
    with pytest.raises(MarsError, match="mask token"):
        BlockDiffusionDecoder(tiny_checkpoint(mars=False))
    decoder = BlockDiffusionDecoder(checkpoint)
    with pytest.raises(MarsError, match="trained with 4"):
        decoder([[5, 6]], [DecodingSettings(tau=1.0, block_size=8)])
    with pytest.raises(MarsError, match="greedily"):
        decoder([[5, 6]], [DecodingSettings(tau=1.0, temperature=1.0)])
    with pytest.raises(MarsError, match="empty"):
        decoder([[]], [DecodingSettings(tau=1.0)])
    with pytest.raises(MarsError, match="shorten"):
        decoder([[5] * 256], [DecodingSettings(tau=1.0)])


# -- drafters: AR's own text


def ar(checkpoint, asked, settings):
    return generate(checkpoint, asked, dataclasses.replace(settings, tau=1.0, block_size=None), max_rows=3)


def drafters(checkpoint, asked):
    heads = MedusaHeads(3, 32)
    draft = tiny_checkpoint(seed=1)
    return {
        "jacobi": JacobiDecoder(checkpoint, max_rows=3),
        "medusa": MedusaDecoder(checkpoint, heads, max_rows=3),
        "prompt-lookup": AssistedDecoder(checkpoint),
        "assisted": AssistedDecoder(checkpoint, draft=draft),
    }


@pytest.mark.parametrize("name", ["jacobi", "medusa", "prompt-lookup", "assisted"])
@pytest.mark.parametrize("size", [None, 2, 5])
def test_drafters_write_ars_text(checkpoint, name: str, size) -> None:
    asked = prompts(4 if name == "assisted" else 7)
    settings = DecodingSettings(tau=1.0, block_size=size, max_new_tokens=12)
    seen: list[int] = []
    results = drafters(checkpoint, asked)[name](
        asked, [settings] * len(asked), lambda number, result: seen.append(number)
    )
    expected = ar(checkpoint, asked, settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [r.finish_reason for r in results] == [r.finish_reason for r in expected]
    assert all(1 <= r.forwards <= e.forwards for r, e in zip(results, expected, strict=True))
    assert sorted(seen) == list(range(len(asked)))


@pytest.mark.parametrize("family", ["gemma", "phi", "qwen3"])
def test_drafters_on_other_families(family: str) -> None:
    other = tiny_checkpoint(family)
    asked = prompts(4, seed=1)
    settings = DecodingSettings(tau=1.0, max_new_tokens=10)
    results = JacobiDecoder(other, max_rows=4)(asked, [settings] * 4)
    assert [r.token_ids for r in results] == [r.token_ids for r in ar(other, asked, settings)]


def test_drafters_stop_where_they_are_told(checkpoint) -> None:
    asked = prompts(3)
    free = JacobiDecoder(checkpoint)(asked, [DecodingSettings(tau=1.0, max_new_tokens=12)] * 3)
    for prompt, result in zip(asked, free, strict=True):
        text = checkpoint.tokenizer.decode(result.token_ids)
        if len(text) < 6:
            continue
        stop = text[3:5]
        [stopped] = JacobiDecoder(checkpoint)(
            [prompt], [DecodingSettings(tau=1.0, max_new_tokens=12, stop=(stop,))]
        )
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == result.token_ids[: len(stopped.token_ids)]
        assert stop in checkpoint.tokenizer.decode(stopped.token_ids)
        assert stop not in checkpoint.tokenizer.decode(stopped.token_ids[:-1])
    token = free[0].token_ids[2]
    [at_token] = JacobiDecoder(checkpoint)(
        asked[:1], [DecodingSettings(tau=1.0, max_new_tokens=12, stop_token_ids=(token,))]
    )
    assert at_token.token_ids[-1] == token
    # The context ends a text that the budget would not.
    [full] = JacobiDecoder(checkpoint)(
        [[9] * 250], [DecodingSettings(tau=1.0, max_new_tokens=50, ignore_eos=True)]
    )
    assert len(full.token_ids) == 6


def test_medusa_heads_learn_what_the_model_says_next(checkpoint, tmp_path: Path) -> None:
    asked = prompts(12, seed=5)
    settings = DecodingSettings(tau=1.0, max_new_tokens=24)
    own = ar(checkpoint, asked, settings)
    examples = [(p + r.token_ids, len(p)) for p, r in zip(asked, own, strict=True)]
    before = [parameter.clone() for parameter in checkpoint.model.parameters()]
    heads = train_heads(checkpoint, examples, heads=3, steps=150, batch_size=6, learning_rate=1e-2)
    after = checkpoint.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))  # the model is frozen
    save_heads(heads, tmp_path, fingerprint="x")
    decoder = MedusaDecoder(checkpoint, load_heads(tmp_path, checkpoint))
    results = decoder(asked, [settings] * len(asked))
    assert [r.token_ids for r in results] == [r.token_ids for r in own]
    trained = sum(len(r.token_ids) for r in results) / sum(r.forwards for r in results)
    fresh = MedusaDecoder(checkpoint, MedusaHeads(3, 32))(asked, [settings] * len(asked))
    untrained = sum(len(r.token_ids) for r in fresh) / sum(r.forwards for r in fresh)
    assert trained > untrained + 0.3
    with pytest.raises(MarsError, match="another width"):
        load_heads(tmp_path, tiny_checkpoint(hidden_size=16))
    with pytest.raises(MarsError, match="no Medusa heads"):
        load_heads(tmp_path / "none", checkpoint)


def test_a_draft_model_with_another_tokenizer_is_refused(checkpoint) -> None:
    other = tiny_checkpoint()
    other.tokenizer.add_tokens(["another"])
    with pytest.raises(MarsError, match="another tokenizer"):
        AssistedDecoder(checkpoint, draft=other)
