"""The model behind one small interface: tokens, positions and slots in; hidden states and logits out.

The tokens of all rows lie in one flat list without padding, as if they were one sequence: only attention
needs to know whose they are, and it is ours. So the dense part of any Hugging Face causal LM costs what its
real tokens cost.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from mars_lm.decoding.kv_cache import WindowCache

ATTENTION = "mars_window"


@dataclasses.dataclass
class Segment:
    """Consecutive rows whose attention is computed in one call.

    `queries` tokens a row (T, padded to the widest), against `slots` slots of the cache (S). Grouped-query
    attention folds the G query heads that share a key head into the query length, so no key is repeated.
    """

    rows: slice
    slots: int
    queries: int
    tokens: slice  # of the flat list
    mask: Tensor | None  # additive [R, 1, T, S] in the model's dtype; None: every query sees all S slots
    gather: Tensor | None = None  # int64 [R*T], token of the segment that fills each padded query
    scatter: Tensor | None = None  # int64 [tokens], padded query that holds each token; both None if R == 1


@dataclasses.dataclass
class ForwardBatch:
    """One forward: N tokens of all rows, flat."""

    input_ids: Tensor  # int64 [1, N]
    position_ids: Tensor  # int64 [1, N]
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
        rows, width = segment.rows.stop - segment.rows.start, segment.queries
        q = flat[segment.tokens]
        if segment.gather is not None:
            q = q.index_select(0, segment.gather)
        q = q.reshape(rows, width, kv_heads, groups, head_dim)
        q = q.permute(0, 2, 1, 3, 4).reshape(rows, kv_heads, width * groups, head_dim)
        out = scaled_dot_product_attention(
            q,
            key[segment.rows, : segment.slots].transpose(1, 2),
            value[segment.rows, : segment.slots].transpose(1, 2),
            attn_mask=segment.mask,
            scale=scaling,
        )  # [R, kv_heads, T*G, head_dim]
        out = (
            out.view(rows, kv_heads, width, groups, -1)
            .permute(0, 2, 1, 3, 4)
            .reshape(rows * width, q_heads, -1)
        )
        if segment.scatter is not None:
            out = out.index_select(0, segment.scatter)
        parts.append(out)
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


AttentionInterface.register(ATTENTION, window_attention)


class ModelForward:
    """A Hugging Face causal LM with a `WindowCache`.

    Args:
        model: any causal LM whose layers all use full attention (SPEC 7 lists what is refused on loading).
        rows, slots: size of the cache.
    """

    def __init__(self, model: PreTrainedModel, rows: int, slots: int) -> None:
        self.model = model
        self.cache = WindowCache(rows, slots)
        self.device = next(model.parameters()).device
        self.dtype = model.dtype
        self._base = model.base_model
        config = model.config
        self.groups = config.num_attention_heads // (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )
        # transformers renamed the argument in 5.x.
        names = inspect.signature(self._base.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._plain_head = self._has_plain_head()

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Run the layers, write the tokens' keys and values: the last hidden states [N, hidden]."""
        self.cache.write_to(batch.cache_index)
        with self._window_attention():
            out = self._base(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=True,
                mars_segments=batch.segments,
                **{self._cache_name: self.cache},
            )
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [M, vocabulary] of hidden states [M, hidden]."""
        if self._plain_head:
            return self.model.get_output_embeddings()(hidden).float()
        # Some models cap or scale their logits in the outer forward: run that one on states we already have.
        with _replaced_forward(self._base, hidden[None]):
            return (
                self.model(input_ids=hidden.new_zeros(1, 1, dtype=torch.long), use_cache=False)
                .logits[0]
                .float()
            )

    def _has_plain_head(self) -> bool:
        """Whether the logits are the output embedding's product and nothing more (no cap, no scale)."""
        state = torch.linspace(-1, 1, self.model.config.hidden_size, dtype=self.dtype, device=self.device)[
            None
        ]
        with torch.inference_mode(), _replaced_forward(self._base, state[None]):
            ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            whole = self.model(input_ids=ids, use_cache=False).logits[0]
            return torch.equal(whole, self.model.get_output_embeddings()(state))

    @contextmanager
    def _window_attention(self) -> Iterator[None]:
        """Our attention for one forward; the model then works elsewhere as before."""
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = before


@contextmanager
def _replaced_forward(base: torch.nn.Module, hidden: Tensor) -> Iterator[None]:
    """Let `base` answer with these hidden states [1, M, hidden] instead of computing any."""
    own = base.__dict__.get("forward")  # as hooks for weights placed elsewhere leave one
    base.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=hidden)
    try:
        yield
    finally:
        if own is None:
            del base.forward
        else:
            base.forward = own
