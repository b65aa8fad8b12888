"""The acceptance rules and the verification of drafts, each against its one-line definition."""

from __future__ import annotations

import numpy as np
import torch

from mars_lm.decoding.acceptance import RULE_CODE, accepted_run, passes
from mars_lm.decoding.verification import agreeing_prefix


def test_rules_of_many_requests_at_once():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(60, 11, generator=generator)
    logits[:, 4] = -torch.inf  # a token that is never a candidate
    candidates = torch.randint(0, 4, (60,), generator=generator)
    rule = np.arange(60) % 3
    tau = np.array([0.0, 0.2, 0.5, 1.0])[np.arange(60) // 3 % 4]
    p = torch.softmax(logits, -1).double().numpy()
    expected = []
    for i in range(60):
        best = np.sort(p[i])[::-1]
        kept = p[i][p[i] > 0]
        expected.append(
            [
                p[i, candidates[i]] >= tau[i],
                best[0] - best[1] >= tau[i],
                -(kept * np.log(kept)).sum() <= tau[i],
            ][rule[i]]
        )
    accepted = passes(logits, candidates, rule, tau)
    assert accepted.tolist() == expected
    assert 0 < sum(expected) < 60
    for code in RULE_CODE.values():  # one rule alone takes the path without an index
        chosen = np.flatnonzero(rule == code)
        alone = passes(logits[chosen], candidates[chosen], rule[chosen], tau[chosen])
        assert alone.tolist() == accepted[chosen].tolist()


def test_a_threshold_of_zero_accepts_anything_but_by_entropy():
    logits = torch.zeros(3, 5)
    rule = np.array([RULE_CODE["probability"], RULE_CODE["margin"], RULE_CODE["entropy"]])
    assert passes(logits, torch.zeros(3, dtype=torch.long), rule, np.zeros(3)).tolist() == [True, True, False]


def test_accepted_run_stops_at_the_first_failure():
    accepted = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=bool)
    assert accepted_run(accepted).tolist() == [2, 0, 4]
    assert accepted_run(np.zeros((2, 0), dtype=bool)).tolist() == [0, 0]


def test_agreeing_prefix_ends_at_the_first_disagreement_or_with_the_draft():
    candidates = np.array([[1, 2, 3, 4], [1, 9, 3, 4], [8, 2, 3, 4], [1, 2, 3, 4]])
    drafts = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    assert agreeing_prefix(candidates, drafts, np.array([3, 3, 3, 1])).tolist() == [3, 1, 0, 1]
    assert agreeing_prefix(candidates[:, :1], drafts[:, :0], np.zeros(4, dtype=int)).tolist() == [0, 0, 0, 0]
