"""transformers' own modules under torch.compile: a layer is one compiled graph around our attention.

All layers share their graphs: one for a single token, one for any greater number. For the compiler, attention
and cache are one operator that it can't look into, so rows, slots and masks may change in every forward
without a new graph.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from mars_lm.decoding.forward import (
    Feed,
    ForwardBatch,
    ModelForward,
    attention_of,
    replaced_forward,
    window_attention,
)
from mars_lm.decoding.invariant import InvariantForward

# Tokens of the forwards that warm up: one, more than one, a prompt.
WARM_UP = (1, 2, 40)
# Graphs of one layer's code in a process: two for each model that was loaded.
GRAPHS = 64

logger = logging.getLogger(__name__)


class CompiledForward(ModelForward):
    """A Hugging Face causal LM whose layers are compiled; arguments as `ModelForward`'s.

    Whatever keeps the compiler from its work (no C++ compiler, code that it can't trace) is logged as one
    warning, and the model runs without it.

    Attributes:
        warm_up_seconds: what compiling took.
    """

    def __init__(self, model: PreTrainedModel, rows: int, slots: int) -> None:
        super().__init__(model, rows, slots)
        self._layers = _layers(model)
        # Whole graphs or none: a layer in pieces would be slower than one that is not compiled.
        self._compiled = [
            torch.compile(layer.forward, dynamic=True, fullgraph=True) for layer in self._layers
        ]
        self._batch: ForwardBatch | None = None
        self._layer = 0
        if not self._compiled:
            logger.warning("Decoding without torch.compile: the model's layers were not found")
        begun = time.perf_counter()
        with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=GRAPHS):
            for tokens in WARM_UP:
                self.hidden(Feed.of_one_row(np.zeros(min(tokens, slots), dtype=np.int64)))
        self.warm_up_seconds = time.perf_counter() - begun
        if self._compiled:
            logger.info("torch.compile has compiled the model's layers in %.1f s", self.warm_up_seconds)

    def run(self, batch: ForwardBatch) -> Tensor:
        """The batch's last hidden states [N, hidden]."""
        if self._compiled:
            try:
                return self._run_compiled(batch)
            except Exception as error:  # the compiler's own errors have no common class
                self._compiled = []
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                logger.warning("Decoding without torch.compile, which can't run this model: %s", reason)
        return super().run(batch)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One layer's attention, called by the compiled layers in their order.

        Args:
            query: [1, q_heads, N, head_dim]; key, value: [1, kv_heads, N, head_dim] of the new tokens.
        Returns:
            [1, N, q_heads, head_dim].
        """
        assert self._batch is not None
        keys, values = self.cache.update(key, value, self._layer)
        self._layer += 1
        segments = self._batch.segments
        out, _ = window_attention(self.model, query, keys, values, scaling=scale, mars_segments=segments)
        return out.contiguous()

    def _run_compiled(self, batch: ForwardBatch) -> Tensor:
        self._batch, self._layer = batch, 0
        self.cache.write_to(batch.cache_index)
        with ExitStack() as stack:
            stack.enter_context(_running(self))
            stack.enter_context(attention_of(self.model, ATTENTION))
            for layer, compiled in zip(self._layers, self._compiled, strict=True):
                stack.enter_context(replaced_forward(layer, compiled))
            out = self._base(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=True,
                **{self._cache_name: _NEW_ENTRIES},
            )
        return out.last_hidden_state[0]


class CompiledInvariantForward(InvariantForward, CompiledForward):
    """Both: each pass of fixed size goes through compiled layers."""


class _NewEntries:
    """Stands for the cache in a compiled layer: hands new entries on to the attention, which keeps them."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


_NEW_ENTRIES = _NewEntries()
# The forward that runs in this thread: an operator has no argument for it.
_now = threading.local()


@contextmanager
def _running(forward: CompiledForward) -> Iterator[None]:
    _now.forward = forward
    try:
        yield
    finally:
        del _now.forward


# A name of this module's own, as in `forward`.
ATTENTION = f"mars_compiled_{id(_now):x}"
_library = torch.library.Library(ATTENTION, "DEF")
_library.define("attend(Tensor query, Tensor key, Tensor value, float scale) -> Tensor")
_library.impl("attend", lambda *args: _now.forward.attend(*args), "CompositeExplicitAutograd")


@torch.library.register_fake(f"{ATTENTION}::attend", lib=_library)
def _shape(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


_attend = getattr(torch.ops, ATTENTION).attend


def _compiled_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    return _attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


AttentionInterface.register(ATTENTION, _compiled_attention)


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder's layers in order; empty where there is no list of them."""
    count = model.config.num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    return []
