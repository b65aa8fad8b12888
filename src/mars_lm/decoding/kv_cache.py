"""The slot = position KV cache under any Hugging Face causal LM (SPEC 5)."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory a CPU takes page by page, as slots are first written.

    A cache is sized for the longest request, and most never get there. Zeros, not garbage: a void slot has
    weight 0 in the attention, and 0 x NaN would be NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = mmap.mmap(-1, max(math.prod(shape) * dtype.itemsize, 1))
    # Huge pages would take 2 MB for the first slot of every layer, row and head.
    with contextlib.suppress(AttributeError, OSError):
        raw.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(raw, dtype=dtype, count=math.prod(shape)).view(shape)


class WindowCache:
    """Keys and values of `rows` requests, `slots` each, for every layer.

    Row r holds position s in slot s. Nothing is moved (a shared prompt's beginning is copied once): a forward
    writes its tokens' entries where `write_to` says, and an entry that turns out void is overwritten by the
    next token at its position.
    The model calls `update` as it would on a `transformers.Cache`.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        self.keys: list[Tensor] = []  # one a layer: [rows, slots, kv_heads, head_dim]
        self.values: list[Tensor] = []
        self._index: Tensor | slice = slice(0, 0)

    def write_to(self, index: Tensor | slice) -> None:
        """Where the next forward's tokens go: int64 [n] (or a slice) into the flattened rows x slots.

        A forward of more than n tokens is padded, and what it has behind the first n is not kept.
        """
        self._index = index

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store one layer's [1, kv_heads, N, head_dim] and return its whole buffers (views, no copy)."""
        if layer_idx == len(self.keys):
            self.keys.append(self._allocate(key))
            self.values.append(self._allocate(value))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        for buffer, new in ((keys, key), (values, value)):
            flat = buffer.flatten(0, 1)
            entries = new[0].transpose(0, 1)  # [N, kv_heads, head_dim]
            if isinstance(self._index, slice):
                flat[self._index] = entries[: self._index.stop - self._index.start]
            else:
                flat.index_copy_(0, self._index, entries[: len(self._index)])
        return keys, values

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give row `target` the first `length` entries of row `source`."""
        for buffer in (*self.keys, *self.values):
            buffer[target, :length] = buffer[source, :length]

    def wipe(self, row: int, slots: int) -> None:
        """Zero a row's first slots where they may hold NaN, so that the next request there is not touched."""
        for buffer in (*self.keys, *self.values):
            buffer[row, :slots].zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Models ask only when they are given no position ids; ours always are."""
        return 0

    def _allocate(self, like: Tensor) -> Tensor:
        return lazy_zeros((self.rows, self.slots, like.shape[1], like.shape[3]), like.dtype, like.device)
