"""Logits -> the candidate at each position."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def greedy(logits: Tensor) -> tuple[Tensor, np.ndarray]:
    """The most probable token of each position.

    Args:
        logits: float32 [M, V].
    Returns:
        candidates: int64 [M], on the logits' device; finite: bool [M] (numpy), False where the logits hold
        NaN or nothing but infinities, so that no candidate means anything.
    """
    best = logits.max(dim=-1)  # max lets a NaN through, so its value also tells a broken row
    return best.indices, np.isfinite(best.values.cpu().numpy())
