"""Exact mode (SPEC 4): which part of a draft is what AR would have said."""

from __future__ import annotations

import numpy as np


def agreeing_prefix(candidates: np.ndarray, drafts: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """Longest run of draft tokens that equal the AR candidates before them.

    The draft was fed as clean tokens, so `candidates[:, i]` is AR's token after the committed tokens and
    `drafts[:, :i]`, right whenever those i draft tokens are. The AR candidate behind the agreeing run is
    therefore always committed: with an empty draft, that is plain AR.

    Args:
        candidates: int64 [R, J+1]; drafts: int64 [R, J]; drafted: int64 [R], how many of the J are real.
    Returns:
        int64 [R], between 0 and `drafted`.
    """
    width = drafts.shape[1]
    agree = (candidates[:, :width] == drafts) & (np.arange(width) < drafted[:, None])
    return np.logical_and.accumulate(agree, axis=1).sum(axis=1)
