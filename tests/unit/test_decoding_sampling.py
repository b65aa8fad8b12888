"""Sampling: the distribution is the softmax's, a seed fixes the text, and exact mode draws what AR draws."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from decoding_reference import biased, logits_of
from mars_lm.decoding import generate
from mars_lm.decoding.sampling import Sampling, sample
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint

FILTERS = {
    "none": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.2},
    "all": {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
}


@pytest.fixture(scope="module")
def checkpoint():
    return biased(tiny_checkpoint())


def how(count: int, *, seed: int = 0, temperature: float = 1.0, top_k: int = 0, top_p=1.0, min_p=0.0):
    return Sampling(
        temperature=np.full(count, temperature),
        top_k=np.full(count, top_k),
        top_p=np.full(count, top_p),
        min_p=np.full(count, min_p),
        seed=np.arange(seed, seed + count, dtype=np.uint64),
        position=np.full(count, 3),
    )


def distribution(logits: torch.Tensor, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Float64 [V], filtered one step after the other as transformers does."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = logits[None].double() / temperature
    ids = torch.zeros(1, 1, dtype=torch.long)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return scores.softmax(-1)[0]


def assert_drawn_from(expected: np.ndarray, counts: np.ndarray) -> None:
    """Chi-square over the outcomes that are expected 5 times or more, the others together.

    The bound is 5 standard deviations of the statistic (mean df, variance 2 df) plus 5, so that a right
    sampler fails less than once in ten thousand seeds; ours are fixed.
    """
    draws = counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected * draws < 5
    wanted = np.append(expected[~rare], expected[rare].sum()) * draws
    seen = np.append(counts[~rare], counts[rare].sum())
    if wanted[-1] < 5:
        wanted, seen = wanted[:-1], seen[:-1]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert statistic <= freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("name", FILTERS)
def test_one_draw_follows_the_filtered_softmax(name, temperature):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    logits[4] = -torch.inf
    options = {"temperature": temperature, **FILTERS[name]}
    drawn = sample(logits.expand(20000, -1), how(20000, **options)).numpy()
    expected = distribution(logits, **options).numpy()
    assert_drawn_from(expected, np.bincount(drawn, minlength=12))


def test_a_wide_nucleus_is_cut_where_a_full_sort_cuts_it():
    logits = (
        torch.randn(4000, generator=torch.Generator().manual_seed(2)) * 0.1
    )  # far more than the first look
    drawn = sample(logits.expand(300, -1), how(300, top_p=0.6)).unique()
    kept = distribution(logits, top_p=0.6) > 0
    assert kept[drawn].all()
    mixed = how(3, top_p=0.6)
    mixed.top_k[1] = 2
    mixed.top_p[2] = 1.0
    assert sample(logits.expand(3, -1), mixed)[0] == sample(logits[None], how(1, top_p=0.6))[0]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["none", "all"])
def test_all_continuations_of_a_tiny_vocabulary_come_as_often_as_enumeration_says(name, exact):
    """Two tokens after a prompt, 8 words possible: AR's probability of each pair against 1500 seeds."""
    checkpoint = biased(tiny_checkpoint(seed=2), range(20, 28), gain=3.0)
    words = list(range(20, 28))
    options = {"temperature": 1.5, **FILTERS[name]}
    banned = tuple((t,) for t in range(checkpoint.model.config.vocab_size) if t not in words)
    prompt = [5, 9, 30]

    def next_one(ids: list[int]) -> np.ndarray:
        logits = torch.full((checkpoint.model.config.vocab_size,), -torch.inf)
        logits[words] = logits_of(checkpoint, ids)[-1][words]
        return distribution(logits, **options)[words].numpy()

    first = next_one(prompt)
    expected = np.concatenate([first[i] * next_one([*prompt, t]) for i, t in enumerate(words)])
    draws = 1500
    settings = [
        DecodingSettings(
            tau=0.0 if exact else 1.0,
            exact=exact,
            max_new_tokens=3,
            seed=seed,
            bad_words_ids=banned,
            **options,
        )
        for seed in range(draws)
    ]
    results = generate(checkpoint, [prompt] * draws, settings, max_rows=64)
    pairs = {pair: k for k, pair in enumerate(itertools.product(words, words))}
    counts = np.bincount([pairs[tuple(r.token_ids[:2])] for r in results], minlength=len(pairs))
    assert_drawn_from(expected, counts)
    if exact:
        assert any(max(r.accepted_lengths) > 1 for r in results)


@pytest.mark.parametrize("name", FILTERS)
def test_a_seed_gives_the_same_text_whatever_the_mode_and_the_batch(checkpoint, name):
    base = DecodingSettings(max_new_tokens=16, temperature=0.9, seed=11, **FILTERS[name])
    prompt, others = [5, 6, 7], [[9] * 17, [40], [33, 44]]
    (wanted,) = generate(checkpoint, [prompt], dataclasses.replace(base, tau=1.0))
    settings = [
        base,
        dataclasses.replace(base, tau=0.3),
        dataclasses.replace(base, recovery=False, block_size=2),
        DecodingSettings(max_new_tokens=16, temperature=1.3, top_p=0.5, exact=False),
        DecodingSettings(max_new_tokens=16),
        DecodingSettings(max_new_tokens=16, temperature=1.0, seed=3),
    ]
    results = generate(checkpoint, [prompt] * 3 + others, settings, max_rows=4)
    for result in results[:3]:
        assert result.token_ids == wanted.token_ids


def test_without_a_seed_each_request_is_drawn_anew(checkpoint):
    settings = DecodingSettings(max_new_tokens=12, temperature=2.0, tau=1.0)
    texts = {tuple(r.token_ids) for r in generate(checkpoint, [[5, 6, 7]] * 4, settings)}
    assert len(texts) > 1
