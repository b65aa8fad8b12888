"""How many masks are placed: as many as pay, and whatever that is, the text is AR's."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from mars_lm.decoding import Engine, generate
from mars_lm.decoding.width import (
    KINDS,
    MEMORY,
    PRIOR,
    PRIOR_WEIGHT,
    PROBE_EVERY,
    SURE,
    THRESHOLDS,
    AdaptiveWidth,
    ForwardCost,
    draft_kind,
)
from mars_lm.settings import RULES, DecodingSettings
from tiny import tiny_checkpoint

LOSSY = DecodingSettings(exact=False, tau=0.9)


def width(per_token: float, fixed: float = 1.0, block_size: int = 4) -> AdaptiveWidth:
    """On a machine whose forward takes `fixed` + `per_token` for each token."""
    return AdaptiveWidth(block_size, ForwardCost({n: fixed + per_token * n for n in (1, 8, 32)}))


def full_groups(rows: int, drafted: int, masks: int = 3) -> tuple[np.ndarray, np.ndarray]:
    groups = np.full((rows, drafted + 1), masks)
    return groups, np.full(rows, drafted)


def test_a_cost_is_known_between_and_beyond_what_was_measured():
    cost = ForwardCost({1: 1.0, 8: 2.0, 32: 5.0})
    assert cost(1) == pytest.approx(1.0)
    assert cost(8) == pytest.approx(2.0)
    assert cost(20) == pytest.approx(3.5, rel=0.05)
    assert cost(64) == pytest.approx(9.0, rel=0.05)


def test_a_cost_follows_what_steps_take():
    cost = ForwardCost({1: 1.0, 8: 1.0, 32: 1.0})
    for _ in range(200):
        cost.learn(16, 3.0)
        cost.learn(1, 1.0)
    assert cost(16) == pytest.approx(3.0, rel=0.1)
    assert cost(1) == pytest.approx(1.0, rel=0.1)
    cost.learn(1, 1000.0)  # the machine was busy with something else
    assert cost(1) < 1.3


def test_a_cost_keeps_the_edge_where_the_weights_are_read_once_more():
    """A forward of 33 tokens takes a pass more than one of 32: the two sizes' costs are not mixed."""

    def true_seconds(tokens: int) -> float:
        return 1.0 + tokens / 100 + 0.5 * (tokens > 32)

    cost = ForwardCost({n: true_seconds(n) * 1.3 for n in (1, 16, 32, 33, 64)}, tokens_a_pass=32)
    for step in range(400):
        tokens = (16, 32, 34, 36)[step % 4]
        cost.learn(tokens, true_seconds(tokens))
    for tokens in (32, 33):
        assert cost(tokens) == pytest.approx(true_seconds(tokens), rel=0.05)


def test_where_no_mask_pays_the_choice_is_made_anew_in_one_step_of_four_or_as_soon_as_rows_change():
    chooser = width(1.0, fixed=0.0)
    chosen = []
    chooser.cost = lambda tokens, cost=chooser.cost: chosen.append(1) or cost(tokens)
    groups, drafted = full_groups(4, 0)
    for _ in range(8):
        assert not chooser.choose(groups, drafted, np.ones(4, dtype=bool), 4).any()
    assert len(chosen) == 2
    chooser.choose(groups[:3], drafted[:3], np.ones(3, dtype=bool), 3)
    assert len(chosen) == 3


def test_all_masks_where_a_token_is_free_and_none_where_it_costs_a_forward():
    groups, drafted = full_groups(2, 3)
    everybody = np.ones(2, dtype=bool)
    assert (width(0.0).choose(groups, drafted, everybody, 8) == groups).all()
    assert not width(1.0, fixed=0.0).choose(groups, drafted, everybody, 8).any()
    some = [int(width(c).choose(groups, drafted, everybody, 8).sum()) for c in (0.0, 0.01, 0.03, 0.1, 0.5)]
    assert some == sorted(some, reverse=True)
    assert len(set(some)) > 2


@pytest.mark.parametrize("mixed", [False, True], ids=["exact", "exact and lossy"])
def test_the_choice_is_the_best_of_all_thresholds_by_a_slow_count(mixed):
    rng = np.random.default_rng(0)
    for _ in range(50):
        chooser = width(float(rng.choice([0.005, 0.02, 0.05, 0.1])))
        chooser.hits = chooser.tries * rng.uniform(0.2, 0.95, chooser.tries.shape)
        kinds = np.where(rng.random(5) < 0.5, 0, draft_kind(LOSSY)) if mixed else np.zeros(5, dtype=int)
        j = np.where(kinds == 0, rng.integers(0, 4, 5), 0)  # in lossy mode there is no draft ...
        trusted = np.where(kinds == 0, 0, rng.integers(0, 4, 5))  # ... but what the last masks gave is fed
        groups = np.where(np.arange(j.max() + 1) <= j[:, None], rng.integers(0, 4, (5, 1)), 0)
        clean = int(5 + j.sum() + trusted.sum())
        best = None
        for threshold in THRESHOLDS:
            chosen, gain, drafts = np.zeros_like(groups), 0.0, 0.0
            for r, row in enumerate(groups):
                p = (chooser.hits / chooser.tries)[kinds[r]]
                for k, most in enumerate(row):
                    outcome = np.prod(p[:k]) * ((1 - p[k]) if k < j[r] else 1.0)
                    for depth in range(1, most + 1):
                        if outcome * np.prod(p[:depth]) >= threshold:
                            chosen[r, k] = depth
                            gain += outcome * np.prod(p[:depth])
                            drafts += outcome if kinds[r] == 0 else np.prod(p[:depth])
            own = groups.sum(axis=1) > 0
            tokens = clean - (j + trusted)[own].sum() + chosen.sum() + drafts
            rate = (5 + gain) / float(chooser.cost(tokens))
            if best is None or rate > best[0] * (1 + 1e-9):
                best = (rate, chosen)
        got = chooser.choose(groups, j, np.ones(5, dtype=bool), clean, kinds=kinds, trusted=trusted)
        assert (got == best[1]).all()


def test_a_prompt_in_the_forward_makes_no_mask_cheaper():
    groups, drafted = full_groups(4, 2)
    everybody = np.ones(4, dtype=bool)
    for per_token in (0.01, 0.03, 0.1):
        alone = width(per_token).choose(groups, drafted, everybody, 12)
        beside = width(per_token).choose(groups, drafted, everybody, 12 + 5000, prompt=5000)
        assert (alone == beside).all()
        # A row that ends its prompt gets a token, one in the midst of it does not.
        more = np.concatenate([groups, np.zeros((1, 3), dtype=int)])
        unfinished = width(per_token).choose(
            more, np.append(drafted, 0), np.ones(5, dtype=bool), 12 + 400, prompt=400, rows=4
        )
        assert (unfinished[:4] == alone).all()
    assert 0 < width(0.03).choose(groups, drafted, everybody, 12).sum() < groups.sum()


@pytest.mark.parametrize(
    ("per_token", "wrong"),
    [(0.02, {4: 1.0, 8: 1.0, 20: 1.5, 32: 1.5}), (0.1, {4: 1.5, 8: 1.4, 20: 1.0, 32: 1.0})],
)
def test_a_start_that_measured_wrongly_is_set_right(per_token, wrong):
    """Some sizes seemed dearer than they are: they are tried nevertheless, and then used."""

    def true_seconds(tokens: float) -> float:
        return 1.0 + per_token * tokens

    groups, drafted = full_groups(4, 0)
    everybody = np.ones(4, dtype=bool)
    wanted = int(width(per_token).choose(groups, drafted, everybody, 4).sum())
    chooser = AdaptiveWidth(4, ForwardCost({n: true_seconds(n) * factor for n, factor in wrong.items()}))
    used = []
    for _ in range(1500):
        masks = int(chooser.choose(groups, drafted, everybody, 4).sum())
        tokens = 4 + 2 * masks  # each mask leaves a draft for the next forward
        chooser.cost.learn(tokens, true_seconds(tokens))
        used.append(masks)
    assert used[0] != wanted

    def rate(masks: int) -> float:
        gain = sum(sum(0.65**d for d in range(1, depth + 1)) for depth in [masks // 4] * 4)
        return (4 + gain) / true_seconds(4 + 2 * masks)

    assert wanted == max((0, 4, 8, 12), key=rate)
    assert np.mean([rate(masks) for masks in used[-400:]]) > 0.98 * rate(wanted) > rate(used[0])


def test_rows_with_a_fixed_width_keep_theirs():
    groups, drafted = full_groups(3, 2)
    chosen = width(1.0, fixed=0.0).choose(groups, drafted, np.array([True, False, True]), 9)
    assert chosen[1].tolist() == [3, 3, 3]
    assert chosen[[0, 2]].sum() < groups[[0, 2]].sum()


def test_where_no_mask_pays_one_row_still_tries_now_and_then():
    groups, drafted = full_groups(4, 0)
    chooser = width(1.0, fixed=0.0)
    sums = [int(chooser.choose(groups, drafted, np.ones(4, dtype=bool), 4).sum()) for _ in range(96)]
    assert sums.count(3) == 96 // PROBE_EVERY
    assert sums.count(0) == 96 - 96 // PROBE_EVERY


def test_confirmed_drafts_are_counted_by_distance():
    chooser = width(0.0)
    hits, tries = chooser.hits.copy(), chooser.tries.copy()
    exact = np.zeros(4, dtype=int)
    chooser.learn(exact, np.array([3, 3, 1, 0]), np.array([3, 1, 1, 0]))
    assert (chooser.hits - hits)[0].tolist() == pytest.approx([3, 1, 1])
    assert (chooser.tries - tries)[0].tolist() == pytest.approx([3, 2, 1])
    for _ in range(500):
        chooser.learn(exact[:1], np.array([3]), np.array([0]))
    assert chooser.hits[0, 0] / chooser.tries[0, 0] < 0.2
    assert (chooser.hits[1:] == hits[1:]).all()  # another mode's drafts are none of these


def test_lossy_drafts_are_counted_by_rule_and_threshold():
    kinds = [
        draft_kind(DecodingSettings(exact=False, rule=rule, tau=tau))
        for rule in RULES
        for tau in (0.0, 0.5, 0.9, 1.0)
    ]
    assert len({0, *kinds}) == 1 + len(kinds)
    assert draft_kind(DecodingSettings()) == 0  # what a choice without kinds takes
    assert 0 < draft_kind(DecodingSettings(tau=0.9)) < min(kinds)
    assert draft_kind(DecodingSettings(exact=False, tau=0.9)) == draft_kind(LOSSY)
    assert max(draft_kind(DecodingSettings(exact=False, rule="entropy", tau=t)) for t in (2, 1e9)) < KINDS
    chooser = width(0.0)
    chooser.learn(np.array([0, kinds[1]]), np.array([3, 3]), np.array([0, 3]))
    share = chooser.hits / chooser.tries
    assert share[0, 0] < share[kinds[2], 0] < share[kinds[1], 0]


def test_guesses_that_the_rule_keeps_out_of_the_draft_were_masks_for_nothing():
    """With a τ that no guess reaches, exact mode drafts nothing: it learns that its masks bring nothing."""
    checkpoint = tiny_checkpoint("llama", seed=3)
    engine = Engine(checkpoint, max_rows=1)
    settings = DecodingSettings(tau=0.999, max_new_tokens=150, ignore_eos=True)
    number = engine.add([5, 6, 7], settings)
    placed = []
    while engine.has_work:
        engine._width.cost = ForwardCost({n: 1 + 0.1 * n for n in (1, 8, 32)})
        before = engine.result(number).masks
        engine.step()
        placed.append(engine._find(number).result.masks - before if engine.has_work else 0)
    kind = draft_kind(settings)
    assert engine._width.hits[kind, 0] / engine._width.tries[kind, 0] < 0.4
    assert sum(placed[:10]) > 0
    assert sum(placed[100:]) <= 3 * 50 / PROBE_EVERY + 3


def test_lossy_rows_adapt_where_asked_and_learn_what_passes():
    """Each accepted token passed the rule whatever the width; where a mask costs a forward there are none."""
    checkpoint = tiny_checkpoint("llama", seed=3)
    prompts = [[7 * i % 290 for i in range(1, 9 + k)] for k in range(4)]

    def decode(slope: float, settings: DecodingSettings):
        engine = Engine(checkpoint, max_rows=4)
        numbers = [engine.add(prompt, settings) for prompt in prompts]
        while engine.has_work:
            engine._width.cost = ForwardCost({n: 1 + slope * n for n in (1, 8, 32)})
            engine.step()
        return engine, [engine.result(number) for number in numbers]

    lossy = DecodingSettings(exact=False, tau=0.004, max_new_tokens=60, ignore_eos=True)
    _, fixed = decode(0.0, lossy)
    engine, free = decode(0.0, dataclasses.replace(lossy, adaptive=True))
    assert [r.token_ids for r in free] == [r.token_ids for r in fixed]
    assert sum(r.masks for r in free) == sum(r.masks for r in fixed) > 0
    kind = draft_kind(lossy)
    accepted = sum(n - 1 for r in free for n in r.accepted_lengths)
    assert 0 < accepted <= (engine._width.hits[kind] - PRIOR * PRIOR_WEIGHT).sum() <= accepted + 3 * 4
    assert (engine._width.tries[0] == PRIOR_WEIGHT).all()
    _, dear = decode(50.0, dataclasses.replace(lossy, adaptive=True))
    assert sum(r.masks for r in dear) < 0.1 * sum(r.masks for r in fixed)
    _, always = decode(50.0, lossy)
    assert [r.token_ids for r in always] == [r.token_ids for r in fixed]


@pytest.mark.parametrize("recovery", [True, False])
def test_whatever_is_chosen_the_text_is_one_token_modes(recovery):
    """Costs that jump at random make the width jump; with sampling and penalties in the batch as well."""
    draw = random.Random(0)
    checkpoint = tiny_checkpoint("llama", seed=3)
    prompts = [[draw.randrange(300) for _ in range(draw.randrange(1, 30))] for _ in range(9)]
    wishes = [
        {"temperature": 0.8, "seed": i} if i % 3 == 1 else {"repetition_penalty": 1.3} if i % 3 == 2 else {}
        for i in range(9)
    ]
    one = [DecodingSettings(tau=1.0, max_new_tokens=30, ignore_eos=True, **wish) for wish in wishes]
    expected = [r.token_ids for r in generate(checkpoint, prompts, one)]
    engine = Engine(checkpoint, max_rows=4)
    numbers = [
        engine.add(
            prompt,
            DecodingSettings(max_new_tokens=30, ignore_eos=True, recovery=recovery, **wish),
        )
        for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    placed = set()
    while engine.has_work:
        slope = draw.choice([0.0, 0.01, 0.05, 0.2, 5.0])
        engine._width.cost = ForwardCost({n: 1 + slope * n for n in (1, 8, 32)})
        engine.step()
        placed.update(int(m) for m in engine._state.drafted[engine._state.active])
    results = [engine.result(number) for number in numbers]
    assert [r.token_ids for r in results] == expected
    assert placed == {0, 1, 2, 3}
    assert sum(r.masks for r in results) > 0


def test_masks_go_where_the_draft_is_likely_to_end():
    """The first token is sure and the second is not: the group between them is worth more than any other."""
    groups, drafted = full_groups(1, 3)
    everybody = np.ones(1, dtype=bool)
    chooser = width(0.3)
    doubtful = chooser.choose(groups, drafted, everybody, 4, sure=np.array([[0.97, 0.05, 0.9]]))[0]
    certain = width(0.3).choose(groups, drafted, everybody, 4, sure=np.array([[0.97, 0.97, 0.97]]))[0]
    assert doubtful[1] > 0 == doubtful[0] == doubtful[3]
    assert certain[3] > 0 == certain[0] == certain[1]
    unknown = width(0.3).choose(groups, drafted, everybody, 4, sure=np.full((1, 3), np.nan))
    assert (unknown == width(0.3).choose(groups, drafted, everybody, 4)).all()


def test_what_a_probability_is_worth_is_learnt_from_drafts_that_were_verified():
    chooser = width(0.0)
    hits, tries = chooser.sure_hits.copy(), chooser.sure_tries.copy()
    sure = np.array([[0.31, 0.95, np.nan], [1.0, 0.39, 0.62], [np.nan, np.nan, np.nan]])
    chooser.learn(np.array([0, 0, 5]), np.array([2, 3, 3]), np.array([1, 1, 2]), sure)
    seen = np.zeros(SURE)
    seen[[3, 9]] = 2  # 0.31 held and 0.39 did not; 1.0 held and 0.95 did not; 0.62 was never reached
    assert (chooser.sure_tries - tries)[0] == pytest.approx(seen)
    assert (chooser.sure_hits - hits)[0] == pytest.approx(seen / 2)
    assert (chooser.sure_tries[1:] == tries[1:]).all()
    for _ in range(300):
        chooser.learn(np.zeros(1, int), np.array([1]), np.array([0]), np.array([[0.95, np.nan, np.nan]]))
    assert chooser.sure_hits[0, 9] / chooser.sure_tries[0, 9] < 0.2
    assert chooser.sure_tries.max() <= MEMORY + 1


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_engine_knows_how_sure_the_model_was_of_its_draft(kernels):
    """Against the probabilities that a plain forward over text and masks gives."""
    checkpoint = tiny_checkpoint("llama", seed=3, head_dim=16)
    engine = Engine(checkpoint, max_rows=2, kernels=kernels)
    prompt = [5, 6, 7, 8]
    engine.add(prompt, DecodingSettings(max_new_tokens=20, ignore_eos=True))
    engine._width.cost = ForwardCost(dict.fromkeys((1, 8, 32), 1.0))  # all masks
    state = engine._state
    seen = 0
    for _ in range(6):
        known = [int(t) for t in state.tokens[0, : state.length[0]]] or prompt
        before = engine._state.drafted[0]
        engine.step()
        length, drafted = int(state.length[0]), int(state.drafted[0])
        if before or not drafted:  # the masks stood behind a draft: another text than the committed one
            continue
        ids = torch.tensor([[*known, *[checkpoint.mars.mask_token_id] * 3]])
        logits = checkpoint.model(ids).logits[0].float()
        logits[:, checkpoint.mars.mask_token_id] = -torch.inf
        p = logits.softmax(-1)[len(known) :]
        draft = state.tokens[0, length : length + drafted]
        expected = p[torch.arange(drafted), torch.from_numpy(draft)]
        torch.testing.assert_close(
            torch.from_numpy(state.sure[0, :drafted]).float(), expected, rtol=1e-3, atol=1e-5
        )
        assert np.isnan(state.sure[0, drafted:]).all()
        seen += 1
    assert seen
