"""The left-to-right acceptance rule (SPEC 3): how far to trust the candidates of one forward."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mars_lm.settings import RULES

RULE_CODE = {rule: code for code, rule in enumerate(RULES)}


def probability(logits: Tensor, candidates: Tensor) -> Tensor:
    """p(candidate) at temperature 1: accepted when at least τ.

    Args:
        logits: float32 [M, V]; candidates: int64 [M].
    Returns:
        float32 [M].
    """
    chosen = logits.gather(-1, candidates[:, None])[:, 0]
    return torch.exp(chosen - torch.logsumexp(logits, dim=-1))


def margin(logits: Tensor, candidates: Tensor) -> Tensor:
    """p₁ − p₂, the lead of the most probable token over the next: accepted when at least τ. float32 [M]."""
    best = logits.topk(2, dim=-1).values
    p = torch.exp(best - torch.logsumexp(logits, dim=-1, keepdim=True))
    return p[:, 0] - p[:, 1]


def entropy(logits: Tensor, candidates: Tensor) -> Tensor:
    """−Σ p log p in nats: accepted when at most τ. float32 [M]."""
    log_p = torch.log_softmax(logits, dim=-1)
    # p log p is 0 where p is: a token that is never a candidate has log p = -inf.
    return -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)


MEASURES = {"probability": probability, "margin": margin, "entropy": entropy}


def passes(logits: Tensor, candidates: Tensor | np.ndarray, rule: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Apply to each candidate the rule of its own request.

    Args:
        logits: float32 [M, V] at temperature 1; candidates: int64 [M].
        rule: int8 [M], codes of `RULE_CODE`; tau: float64 [M].
    Returns:
        bool [M]: the candidate would be accepted if all to its left are.
    """
    accepted = np.ones(len(rule), dtype=bool)
    # A probability or a margin of at least 0 is no condition: nothing to compute, which is the common case in
    # exact mode, where drafting as far as possible loses nothing.
    needed = (tau > 0) | (rule == RULE_CODE["entropy"])
    if not needed.any():
        return accepted
    candidates = torch.as_tensor(candidates, device=logits.device)
    for name, code in RULE_CODE.items():
        chosen = needed & (rule == code)
        if not chosen.any():
            continue
        if chosen.all():
            measure = MEASURES[name](logits, candidates)
        else:
            index = torch.from_numpy(np.flatnonzero(chosen)).to(logits.device)
            measure = MEASURES[name](logits[index], candidates[index])
        value = measure.double().cpu().numpy()
        accepted[chosen] = value <= tau[chosen] if name == "entropy" else value >= tau[chosen]
    return accepted


def accepted_run(accepted: np.ndarray) -> np.ndarray:
    """Length of the accepted prefix of each row: bool [R, G] -> int64 [R]."""
    return np.logical_and.accumulate(accepted, axis=1).sum(axis=1)
