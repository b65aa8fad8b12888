"""Jacobi decoding: an ordinary AR model guesses several tokens and mends them, forward by forward.

The fixed-point view of greedy decoding (arXiv 2305.10427): all tokens of a window are guessed; each forward
replaces every guess by what the model says behind the guess before it; what agrees is committed.
"""

from __future__ import annotations

from torch import Tensor

from mars_lm.baselines.drafting import DraftingDecoder
from mars_lm.baselines.forward import Request, RowsForward

WINDOW = 8  # tokens of one forward where the request names no block size


class JacobiDecoder(DraftingDecoder):
    """Needs no training and no mask token; the text is AR's.

    Args:
        checkpoint: any model.
        max_rows: prompts decoded together.
    """

    def propose(
        self, request: Request, hidden: Tensor, candidates: list[int], agreed: int, forward: RowsForward
    ) -> list[int]:
        length = self.length(request, WINDOW - 1)
        # Behind the first disagreement every candidate is the iteration's next value of its place; places
        # that no forward has seen yet start as the last token known.
        guesses = candidates[agreed + 1 :][:length]
        last = guesses[-1] if guesses else candidates[agreed]
        return guesses + [last] * (length - len(guesses))
