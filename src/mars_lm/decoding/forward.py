"""The model behind one small interface: tokens, positions and slots in; hidden states and logits out.

The tokens of all rows lie in one flat list without padding, as if they were one sequence: only attention
needs to know whose they are, and it is ours. So the dense part of any Hugging Face causal LM costs what its
real tokens cost.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from mars_lm.decoding.acceptance import probability
from mars_lm.decoding.kv_cache import WindowCache
from mars_lm.decoding.sampling import best_tokens

Ints = np.ndarray

# Rows that bring more tokens than this (a prompt's) get an attention call of their own: padding the others to
# their width would cost more than the call.
WIDE = 64


@dataclasses.dataclass
class Feed:
    """What one forward reads of R rows: N tokens, one row's behind the other's, without padding."""

    rows: Ints  # [R] their numbers in the cache, ascending
    width: Ints  # [R] tokens of the row
    input_ids: Ints  # [N]
    position_ids: Ints  # [N]
    slots: Ints  # [N] where the token's key and value go; a row's are consecutive
    sees_before: Ints  # [N] a token sees its row's slots before this one ...
    sees_from: Ints  # [N] ... and those from here to its own

    @cached_property
    def first(self) -> Ints:
        """[R] flat index of the row's first token."""
        return np.cumsum(self.width) - self.width

    @classmethod
    def of_one_row(cls, input_ids: Ints) -> Feed:
        """A text from its beginning, plain and causal, in row 0."""
        place = np.arange(len(input_ids))
        return Feed(np.zeros(1, np.int64), np.array([len(place)]), input_ids, place, place, place + 1, place)


class Cache(Protocol):
    """Slot = position (SPEC 5); what an engine asks of it."""

    slots: int

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give row `target` the first `length` entries of row `source`."""

    def wipe(self, row: int, slots: int) -> None:
        """Make a row's first slots harmless for whoever takes the row next."""


class Forward(Protocol):
    """A model with its cache: tokens, positions and slots in; hidden states and logits out."""

    device: torch.device
    weights: str  # their type's name
    # Up to so many logits, one product costs less than two of those that are read, one behind the other.
    # SmolLM2-135M's output matrix in bfloat16, two threads of a Xeon, ms by logits: transformers' modules
    # 4: 9, 8: 13, 13: 21, 26: 30; the C kernels 1: 1.8, 7: 1.9, 13: 2.3, 26: 3.2; these with tiles 1: 1.7,
    # 16: 1.4, 32: 1.7, 64: 2.8, 128: 5.3.
    one_product: int
    # So many tokens share one reading of the weights, and one more costs another; 0: there is no such edge.
    tokens_a_pass: int

    @property
    def cache(self) -> Cache:
        """Where its tokens' keys and values are."""

    def hidden(self, feed: Feed) -> Tensor:
        """Run the layers, write the tokens' keys and values: the last hidden states [N, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [M, vocabulary] of hidden states [M, hidden]."""

    def decode(self, feed: Feed, read: Ints, never: int | None) -> tuple[Tensor, Tensor, Ints]:
        """`hidden`; `logits` of its tokens `read`, int64 [M], with -inf for `never`; their `best_tokens`.

        All are good until the next call.
        """

    def probability(self, logits: Tensor, tokens: Ints) -> np.ndarray:
        """float32 [M]: softmax(logits [M, vocabulary]) of each row's token, int64 [M]."""


@dataclasses.dataclass
class Segment:
    """Consecutive rows whose attention is computed in one call.

    `queries` tokens a row (T, padded to the widest), against `slots` slots of the cache (S). Grouped-query
    attention folds the G query heads that share a key head into the query length, so no key is repeated.
    A single row may be computed in several `pieces` of T tokens, side by side as rows are.
    """

    rows: slice
    slots: int
    queries: int
    tokens: slice  # of the flat list
    mask: Tensor | None  # additive [P, 1, F, S] in the model's dtype; None: every query sees all S slots
    pieces: int  # P; R, unless R == 1
    folded: int  # F, query rows of each key head: T * G, or more, whose results nobody reads
    gather: Tensor | None = None  # int64 [P*T], token of the segment that fills each padded query
    scatter: Tensor | None = None  # int64 [tokens], padded query that holds each token; both None if P == 1


@dataclasses.dataclass
class ForwardBatch:
    """One forward: N tokens of all rows, flat."""

    input_ids: Tensor  # int64 [1, N], or more: padding behind them
    position_ids: Tensor  # int64 [1, N], likewise
    cache_index: Tensor | slice  # int64 [N], row * slots + slot
    segments: list[Segment]


def window_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    mars_segments: list[Segment],
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a flat list of tokens, each row against its own slots.

    Tokens behind those of the last segment are no row's: their result is 0.

    Args:
        query: [1, q_heads, N, head_dim]; key, value: a layer's whole cache [rows, slots, kv_heads, head_dim].
    Returns:
        [1, N, q_heads, head_dim], and no weights.
    """
    q_heads, head_dim = query.shape[1], query.shape[3]
    kv_heads = key.shape[2]
    groups = q_heads // kv_heads
    flat = query[0].transpose(0, 1)  # [N, q_heads, head_dim], a view
    parts = []
    for segment in mars_segments:
        pieces, width = segment.pieces, segment.queries
        q = flat[segment.tokens]
        if segment.gather is not None:
            q = q.index_select(0, segment.gather)
        q = q.reshape(pieces, width, kv_heads, groups, head_dim)
        q = q.permute(0, 2, 1, 3, 4).reshape(pieces, kv_heads, width * groups, head_dim)
        if segment.folded > width * groups:
            q = pad(q, (0, 0, 0, segment.folded - width * groups))
        keys, values = (
            cached[segment.rows, : segment.slots].transpose(1, 2).expand(pieces, -1, -1, -1)
            for cached in (key, value)
        )
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=segment.mask, scale=scaling
        )  # [P, kv_heads, F, head_dim]
        out = (
            out[:, :, : width * groups]
            .unflatten(2, (width, groups))
            .permute(0, 2, 1, 3, 4)
            .reshape(pieces * width, q_heads, -1)
        )
        if segment.scatter is not None:
            out = out.index_select(0, segment.scatter)
        parts.append(out)
    missing = len(flat) - mars_segments[-1].tokens.stop
    if missing:
        parts.append(parts[-1].new_zeros(missing, *parts[-1].shape[1:]))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


# A name of this module's own: a copy of it, written beside a checkpoint, may be loaded in the same process.
ATTENTION = f"mars_window_{id(window_attention):x}"
AttentionInterface.register(ATTENTION, window_attention)


class ModelForward:
    """A Hugging Face causal LM with a `WindowCache`.

    Args:
        model: any causal LM whose layers all use full attention (SPEC 7 lists what is refused on loading).
        rows, slots: size of the cache.
    """

    one_product = 13
    tokens_a_pass = 0

    def __init__(self, model: PreTrainedModel, rows: int, slots: int) -> None:
        self.model = model
        self.cache = WindowCache(rows, slots)
        self.device = next(model.parameters()).device
        self.dtype = model.dtype
        self.weights = str(model.dtype)
        self._base = model.base_model
        config = model.config
        self.groups = config.num_attention_heads // (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )
        # transformers renamed the argument in 5.x.
        names = inspect.signature(self._base.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._plain_head = self._has_plain_head()

    def hidden(self, feed: Feed) -> Tensor:
        """Run the layers, write the tokens' keys and values: the last hidden states [N, hidden]."""
        return self.run(to_batch(feed, self))

    def run(self, batch: ForwardBatch) -> Tensor:
        """The batch's last hidden states [N, hidden]."""
        self.cache.write_to(batch.cache_index)
        with attention_of(self.model, ATTENTION):
            out = self._base(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=True,
                mars_segments=batch.segments,
                **{self._cache_name: self.cache},
            )
        return out.last_hidden_state[0]

    def inputs(self, feed: Feed) -> tuple[Tensor, Tensor]:
        """Token and position ids, int64 [1, N] both."""
        return (
            torch.from_numpy(feed.input_ids)[None].to(self.device),
            torch.from_numpy(feed.position_ids)[None].to(self.device),
        )

    def segments(self, feed: Feed) -> list[Segment]:
        """How the attention of a feed's rows is cut into calls."""
        return [_segment(feed, lo, hi, self) for lo, hi in _runs(feed)]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [M, vocabulary] of hidden states [M, hidden]."""
        if self._plain_head:
            return self.model.get_output_embeddings()(hidden).float()
        return self._outer_logits(hidden).float()

    def decode(self, feed: Feed, read: Ints, never: int | None) -> tuple[Tensor, Tensor, Ints]:
        """`hidden`; `logits` of its tokens `read`, int64 [M], with -inf for `never`; their `best_tokens`."""
        hidden = self.hidden(feed)
        if not len(read):
            return hidden, hidden.new_zeros(0, 1), np.zeros(0, dtype=np.int64)
        logits = self.logits(hidden.index_select(0, torch.from_numpy(read).to(self.device)))
        return hidden, without(logits, never), best_tokens(logits)

    def probability(self, logits: Tensor, tokens: Ints) -> np.ndarray:
        """float32 [M]: softmax(logits [M, vocabulary]) of each row's token, int64 [M]."""
        return probability(logits, torch.from_numpy(tokens).to(logits.device)).cpu().numpy()

    def _has_plain_head(self) -> bool:
        """Whether the logits are the output embedding's product and nothing more (no cap, no scale)."""
        state = torch.linspace(-1, 1, self.model.config.hidden_size, dtype=self.dtype, device=self.device)[
            None
        ]
        with torch.inference_mode():
            return torch.equal(self._outer_logits(state), self.model.get_output_embeddings()(state))

    def _outer_logits(self, hidden: Tensor) -> Tensor:
        """Logits as the model's outer forward makes them, which may cap or scale them: [M, vocabulary]."""
        with alone_with(self.model), replaced_forward(self._base, _answers(hidden[None])):
            ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            return self.model(input_ids=ids, use_cache=False).logits[0]


def without(logits: Tensor, token: int | None) -> Tensor:
    """The logits [M, V], in place, with -inf for the token."""
    if token is not None:
        logits[:, token] = -torch.inf
    return logits


def to_batch(feed: Feed, model: ModelForward) -> ForwardBatch:
    """The feed as tensors on the model's device."""
    device = model.device
    slots_a_row = model.cache.slots
    index: Tensor | slice
    if len(feed.rows) == 1:  # one row's run of slots has no holes
        begin = int(feed.rows[0]) * slots_a_row + int(feed.slots[0])
        index = slice(begin, begin + len(feed.slots))
    else:
        index = torch.from_numpy(np.repeat(feed.rows * slots_a_row, feed.width) + feed.slots).to(device)
    input_ids, position_ids = model.inputs(feed)
    return ForwardBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        cache_index=index,
        segments=model.segments(feed),
    )


def _runs(feed: Feed) -> list[tuple[int, int]]:
    """Split the feed's rows into runs (from, to) for one attention call each."""
    if len(feed.rows) == 1:
        return [(0, 1)]
    wide = feed.width > WIDE
    cut = (np.diff(feed.rows) > 1) | wide[1:] | wide[:-1]
    edges = [0, *(np.flatnonzero(cut) + 1).tolist(), len(feed.rows)]
    return list(itertools.pairwise(edges))


def _segment(feed: Feed, lo: int, hi: int, model: ModelForward) -> Segment:
    width, first = feed.width[lo:hi], feed.first[lo:hi]
    rows, widest = hi - lo, int(width.max())
    base = int(first[0])
    tokens = slice(base, base + int(width.sum()))
    last_slots = feed.slots[first + width - 1]
    slots = int(max(last_slots.max() + 1, feed.sees_before[tokens].max()))
    segment = Segment(
        rows=slice(int(feed.rows[lo]), int(feed.rows[hi - 1]) + 1),
        slots=slots,
        queries=widest,
        tokens=tokens,
        mask=None,
        pieces=rows,
        folded=widest * model.groups,
    )
    if rows == 1:
        grid = np.arange(tokens.start, tokens.stop)[None]
    else:
        # A query that only pads repeats its row's last token; nobody reads its result.
        grid = first[:, None] + np.minimum(np.arange(widest), width[:, None] - 1)
        if tokens.stop - tokens.start == rows * widest:
            pass  # nothing to pad: the flat list is the grid
        else:
            segment.gather = torch.from_numpy((grid - base).ravel()).to(model.device)
            row = np.repeat(np.arange(rows), width)
            column = np.arange(tokens.start, tokens.stop) - np.repeat(first, width)
            segment.scatter = torch.from_numpy(row * widest + column).to(model.device)
    if widest > 1 or (last_slots != slots - 1).any():
        segment.mask = additive_mask(feed, grid, slots, model)
    return segment


def additive_mask(feed: Feed, grid: Ints, slots: int, model: ModelForward) -> Tensor:
    """[R, 1, T*G, S]: 0 where a query sees a slot, -inf where not; a query's G heads beside each other."""
    device = model.device
    before, begin, own = (
        torch.from_numpy(values[grid]).to(device)[..., None]
        for values in (feed.sees_before, feed.sees_from, feed.slots)
    )  # [R, T, 1]
    slot = torch.arange(slots, device=device)
    seen = (slot < before) | ((slot >= begin) & (slot <= own))
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=device).masked_fill_(~seen, -torch.inf)
    rows, queries = grid.shape
    mask = mask[:, :, None].expand(rows, queries, model.groups, slots)
    return mask.reshape(rows, 1, queries * model.groups, slots)


_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_new_lock = threading.Lock()


@contextmanager
def alone_with(model: PreTrainedModel) -> Iterator[None]:
    """Keep other threads' engines off a model that is changed for one forward: they share its modules."""
    with _new_lock:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        yield


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention for one forward, by its registered name; the model then works as before."""
    with alone_with(model):
        before = model.config._attn_implementation
        model.config._attn_implementation = name
        try:
            yield
        finally:
            model.config._attn_implementation = before


@contextmanager
def replaced_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for a module, for a while."""
    own = module.__dict__.get("forward")  # as hooks for weights placed elsewhere leave one
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _answers(hidden: Tensor) -> Callable[..., BaseModelOutputWithPast]:
    """A base model's forward that gives these hidden states [1, M, hidden] instead of computing any."""
    return lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=hidden)
