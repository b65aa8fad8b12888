"""A forward in which a token's logits are the same to the last bit in any company.

A library picks its kernel, and with it the order of additions, by the shape of what it multiplies. So the
same token gets other last bits in a forward of one token than in one of sixteen, and in bfloat16 that is
enough to swap two words. Here every product has one shape, whatever is decoded: the tokens go through the
model `PASS` at a time, through the output matrix `HEAD` at a time, and through attention in pieces of one
number of query rows against keys in whole blocks. What is missing is padding, whose results nobody reads.

What is left to chance is whether a kernel treats all rows of one product alike; all those that were tried do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from mars_lm.decoding.forward import Feed, ModelForward, Segment, additive_mask

PASS = 16  # tokens that go through the layers together
HEAD = 8  # hidden states that go through the output matrix together
QUERIES = 16  # query rows of a key head in one piece of attention (more only where more heads share it)
# torch's CPU attention goes through the keys in blocks of 512. Up to whole blocks, keys that a query does not
# see add exact zeros; a block's remainder would get a shape of its own.
KEYS = 512


class InvariantForward(ModelForward):
    """A Hugging Face causal LM whose products have one shape; arguments as `ModelForward`'s."""

    def __init__(self, model: PreTrainedModel, rows: int, slots: int) -> None:
        super().__init__(model, rows, _rounded_up(slots, KEYS))

    def hidden(self, feed: Feed) -> Tensor:
        """Run the layers, write the tokens' keys and values: the last hidden states [N, hidden]."""
        parts = [super(InvariantForward, self).hidden(part)[: len(part.input_ids)] for part in _passes(feed)]
        return torch.cat(parts)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [M, vocabulary] of hidden states [M, hidden]."""
        parts = [
            super(InvariantForward, self).logits(pad(part, (0, 0, 0, HEAD - len(part))))[: len(part)]
            for part in hidden.split(HEAD)
        ]
        return torch.cat(parts)

    def inputs(self, feed: Feed) -> tuple[Tensor, Tensor]:
        """Token and position ids, int64 [1, PASS] both."""
        missing = (0, PASS - len(feed.input_ids))
        token_ids, position_ids = super().inputs(feed)
        return pad(token_ids, missing), pad(position_ids, missing)

    def segments(self, feed: Feed) -> list[Segment]:
        """Attention in pieces of as many tokens as make `QUERIES` query rows."""
        tokens = max(1, QUERIES // self.groups)
        alone = feed.width > tokens
        cut = (np.diff(feed.rows) > 1) | alone[1:] | alone[:-1]
        edges = [0, *(np.flatnonzero(cut) + 1).tolist(), len(feed.rows)]
        return [self._pieces(feed, lo, hi, tokens) for lo, hi in itertools.pairwise(edges)]

    def _pieces(self, feed: Feed, lo: int, hi: int, tokens: int) -> Segment:
        """One call: rows of at most `tokens` tokens each, or one row's in several pieces."""
        width, first = feed.width[lo:hi], feed.first[lo:hi]
        of_row = -(-width // tokens)  # pieces
        row = np.repeat(np.arange(hi - lo), of_row)
        begin = first[row] + tokens * (np.arange(len(row)) - (np.cumsum(of_row) - of_row)[row])
        end = np.minimum(begin + tokens, (first + width)[row])
        # A query that only pads repeats its piece's last token.
        grid = np.minimum(begin[:, None] + np.arange(tokens), end[:, None] - 1)  # [P, T]
        base, total = int(first[0]), int(width.sum())
        token = np.arange(base, base + total)
        piece = np.repeat(np.arange(len(row)), end - begin)
        slots = _rounded_up(int(feed.slots[first + width - 1].max()) + 1, KEYS)
        folded = _rounded_up(tokens * self.groups, QUERIES)
        mask = additive_mask(feed, grid, slots, self)
        return Segment(
            rows=slice(int(feed.rows[lo]), int(feed.rows[hi - 1]) + 1),
            slots=slots,
            queries=tokens,
            tokens=slice(base, base + total),
            mask=pad(mask, (0, 0, 0, folded - mask.shape[2])),
            pieces=len(row),
            folded=folded,
            gather=torch.from_numpy((grid - base).ravel()).to(self.device),
            scatter=torch.from_numpy(piece * tokens + token - begin[piece]).to(self.device),
        )


def _passes(feed: Feed) -> Iterator[Feed]:
    """The feed in parts of at most `PASS` tokens; a row may lie in several, one behind the other.

    A token sees nothing behind itself, so what it sees is in the cache or in its own part.
    """
    assert (feed.sees_before <= feed.slots + 1).all()
    row = np.repeat(np.arange(len(feed.rows)), feed.width)
    for begin in range(0, len(row), PASS):
        part = slice(begin, begin + PASS)
        width = np.bincount(row[part], minlength=len(feed.rows))
        here = np.flatnonzero(width)
        yield Feed(
            rows=feed.rows[here],
            width=width[here],
            input_ids=feed.input_ids[part],
            position_ids=feed.position_ids[part],
            slots=feed.slots[part],
            sees_before=feed.sees_before[part],
            sees_from=feed.sees_from[part],
        )


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
