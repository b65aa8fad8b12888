"""A Llama-like model on the CPU kernels, behind the interface of `mars_lm.decoding.forward`."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars_lm.architectures import KERNEL_FAMILIES
from mars_lm.decoding.forward import Feed, alone_with
from mars_lm.decoding.kv_cache import lazy_zeros
from mars_lm.decoding.native.build import library
from mars_lm.decoding.native.fixed_point import fixed_point
from mars_lm.errors import MarsError
from mars_lm.int8 import GROUP, quantized

# What the kernels' hidden states may differ from transformers' on the same tokens, relative to their size:
# rounding alone. transformers rounds to bfloat16 after every operation, the kernels do not.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
INT8_TOLERANCE = 0.3  # eight bits round more
# What the kernels know weights as.
_FLOAT32, _BFLOAT16, _INT8, _INT16, _TILES, _INT8_TILES = range(6)
_EIGHT_BITS, _IN_TILES = (_INT8, _INT8_TILES), (_TILES, _INT8_TILES)

# Of k, that the kernels multiply at once; of the others a vector.
_UNITS = {_INT8: GROUP, _INT16: GROUP, _TILES: 32, _INT8_TILES: GROUP}

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64


class _Linear(ctypes.Structure):
    _fields_ = (("w", _Pointer), ("scale", _Pointer), ("bias", _Pointer), ("k", _Int), ("n", _Int))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("norm_attention", "norm_mlp", "norm_q", "norm_k")),
        *((name, _Linear) for name in ("qkv", "out", "gate_up", "down")),
        ("keys", _Pointer),
        ("values", _Pointer),
    )


_SIZES = ("layers", "hidden", "intermediate", "q_heads", "kv_heads", "head_dim", "slots")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _Int) for name in _SIZES),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("weights", _Int),
        *((name, _Pointer) for name in ("embedding", "norm_final", "cos", "sin", "layer")),
        ("embedding_bytes", _Int),
    )


class _Feed(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("ids", "row", "slot", "position", "before", "from_", "group")),
        ("tokens", _Int),
        ("groups", _Int),
    )


class _Scratch(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("x", "normed", "qkv", "mixed", "mlp", "squares", "own")),
        ("own_size", _Int),
    )


class NativeCache:
    """Keys and values of `rows` requests, `slots` each, slot = position (SPEC 5).

    A layer's keys are float32 [rows, kv_heads, slots / V, head_dim, V] (V slots beside each other make one
    vector), its values [rows, kv_heads, slots, head_dim]. For tiles both are bfloat16, in pairs of what is
    summed over: [rows, kv_heads, slots / 2V, head_dim / 2, 2V, 2], [rows, kv_heads, slots / 2, head_dim, 2].
    """

    def __init__(
        self, layers: int, rows: int, slots: int, kv_heads: int, head_dim: int, vector: int, kind: int
    ) -> None:
        self.slots = slots = -(-slots // (4 * vector)) * 4 * vector
        dtype, key, value = torch.float32, [slots // vector, head_dim, vector], [slots, head_dim]
        if kind in _IN_TILES:
            dtype = torch.bfloat16
            key = [slots // (2 * vector), head_dim // 2, 2 * vector, 2]
            value = [slots // 2, head_dim, 2]
        self.keys, self.values = (
            [lazy_zeros((rows, kv_heads, *shape), dtype, torch.device("cpu")) for _ in range(layers)]
            for shape in (key, value)
        )

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give row `target` the first `length` entries of row `source`."""
        for buffer in (*self.keys, *self.values):
            together = self.slots // buffer.shape[2]  # the last ones with slots that nobody will see
            buffer[target, :, : -(-length // together)] = buffer[source, :, : -(-length // together)]

    def wipe(self, row: int, slots: int) -> None:
        """Nothing to do: whatever is in a slot, it does not reach a token that does not see it."""


class _Arena:
    """Memory for the packed weights, in huge pages where the system has them."""

    CHUNK = 64 * 2**20  # bytes: a small model's matrices are smaller than a huge page

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous in here, 64-byte aligned."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > len(self._chunk):
            self._chunk, self._used = self._map(max(size, self.CHUNK)), 0
        place = self._chunk[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // 64) * 64
        return place.copy_(tensor)

    @staticmethod
    def _map(size: int) -> Tensor:
        raw = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):
            raw.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(raw, dtype=torch.uint8)


class _Packed:
    """The model's weights as the kernels read them."""

    def __init__(self, model: Any, vector: int, kind: int) -> None:
        config = model.config
        self.vector, self.dtype, self.kind = vector, model.dtype, kind
        self.kept: list[Tensor] = []  # what the structs point to
        self._arena = _Arena()
        self.checked = False  # against transformers' own forward
        self._unit = unit = _UNITS.get(kind, vector)
        self.intermediate = config.intermediate_size + -config.intermediate_size % unit
        self.layers = [self._layer(layer) for layer in model.base_model.layers]
        self.norm = self._vector(model.base_model.norm.weight)
        head = model.get_output_embeddings()
        self.head = self._linear(head.weight, head.bias)
        self.cos, self.sin = self._rotations(model)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if attention.o_proj.bias is not None or mlp.gate_proj.bias is not None:
            raise MarsError("its output or MLP projections have biases")
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [projection.bias for projection in projections]
        bias = None if biases[0] is None else torch.cat(biases)
        pad = self.intermediate - mlp.gate_proj.weight.shape[0]
        gate, up = (
            torch.nn.functional.pad(projection.weight.detach(), (0, 0, 0, pad)).unflatten(
                0, (-1, self.vector)
            )
            for projection in (mlp.gate_proj, mlp.up_proj)
        )
        made = _Layer(
            norm_attention=self._vector(layer.input_layernorm.weight),
            norm_mlp=self._vector(layer.post_attention_layernorm.weight),
            qkv=self._linear(torch.cat([projection.weight for projection in projections]), bias),
            out=self._linear(attention.o_proj.weight, None),
            gate_up=self._linear(torch.stack([gate, up], dim=1).flatten(0, 2), None),
            down=self._linear(torch.nn.functional.pad(mlp.down_proj.weight.detach(), (0, pad)), None),
        )
        if getattr(attention, "q_norm", None) is not None:
            made.norm_q = self._vector(attention.q_norm.weight)
            made.norm_k = self._vector(attention.k_norm.weight)
        return made

    def _keep(self, tensor: Tensor) -> int:
        self.kept.append(self._arena.copy(tensor))
        return self.kept[-1].data_ptr()

    def _vector(self, weight: Tensor) -> int:
        return self._keep(weight.detach().float())

    def _linear(self, weight: Tensor, bias: Tensor | None) -> _Linear:
        """[n, k] -> panels [n / 2V, k, 2V], the last filled with zeros, and k up to whole units.

        bfloat16 and int16: [n / 2V, k / 2, 2V, 2]; int8: [n / 2V, k / 4, 2V, 4]; and scales
        [n / 2V, k / GROUP, 2V].
        """
        n, k = weight.shape
        panel, scale = 2 * self.vector, None
        padded = torch.nn.functional.pad(weight.detach(), (0, -k % self._unit, 0, -n % panel))
        eight_bits = self.kind in _EIGHT_BITS
        if eight_bits or self.kind == _INT16:
            whole, scales = quantized(padded) if eight_bits else fixed_point(padded)
            scale = self._keep(scales.unflatten(0, (-1, panel)).transpose(1, 2))
            padded = (whole.to(torch.int16) + 128).to(torch.uint8) if self.kind == _INT8 else whole
        else:
            padded = padded.to(self.dtype)
        packed = padded.unflatten(0, (-1, panel)).transpose(1, 2)
        if self.kind != _FLOAT32:
            packed = packed.unflatten(1, (-1, 4 if eight_bits else 2)).transpose(2, 3)
        kept_bias = None if bias is None else self._vector(bias)
        return _Linear(w=self._keep(packed), scale=scale, bias=kept_bias, k=padded.shape[1], n=n)

    def _rotations(self, model: Any) -> tuple[int, int]:
        """The model's own cosines and sines of every position of its context, [positions, head_dim / 2]."""
        positions = torch.arange(model.config.max_position_embeddings)[None]
        cos, sin = model.base_model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
        half = cos.shape[-1] // 2
        return self._vector(cos[0, :, :half]), self._vector(sin[0, :, :half])


def _threads(matrix: int) -> int:
    """Threads for a model whose MLP matrices have so many entries: each must outlast a barrier."""
    return max(1, min(torch.get_num_threads(), matrix // 2**16))


def _groups(widths: list[int], most: int, kv_heads: int, threads: int) -> list[int]:
    """Where the tokens begin that share an attention pass, and the end: at most `most`, all of one row.

    `widths`: tokens of each row. Each key head of a group is one thread's piece of work; a lone row is cut so
    that the threads get as many.
    """
    begins, first = [], 0
    for width in widths:
        parts = -(-width // most)
        if len(widths) == 1:
            parts = next((p for p in range(parts, width) if p * kv_heads % threads == 0), parts)
        begins += [first + width * part // parts for part in range(parts)]
        first += width
    return [*begins, first]


# An engine for each call of `generate` must not pack the same weights again.
_packed: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, _Packed]]] = weakref.WeakKeyDictionary()


def _pack(model: Any, vector: int, kind: int) -> _Packed:
    parameters = list(model.parameters())
    if any(parameter.is_inference() for parameter in parameters):
        return _Packed(model, vector, kind)
    state = [(parameter.data_ptr(), parameter._version) for parameter in parameters]
    known = _packed.setdefault(model, {})  # the same model may be read in its own type and in int8
    if kind not in known or known[kind][0] != state:
        known[kind] = (state, _Packed(model, vector, kind))
    return known[kind][1]


def _kind(dtype: torch.dtype, int8: bool, head_dim: int, kernels: ctypes.CDLL) -> int:
    """What a model's weights are multiplied as: what is fastest on this processor."""
    if not int8 and dtype != torch.bfloat16:
        return _FLOAT32
    if head_dim % _UNITS[_TILES] == 0 and kernels.mars_has_tiles():
        return _INT8_TILES if int8 else _TILES
    if int8:
        return _INT8
    return _INT16 if kernels.mars_has_int16() else _BFLOAT16


class NativeForward:
    """A model with its cache, on the CPU kernels.

    Args:
        model: a causal LM of one of `KERNEL_FAMILIES`, float32 or bfloat16, on the CPU. It keeps its own
            weights; the kernels read a packed copy of them (bfloat16: `fixed_point`, where that is faster).
        rows, slots: size of the cache.
        int8: the packed copy is rounded to int8, and so is what it is multiplied with.
    Raises:
        MarsError: the kernels can't be built here, or don't compute what this model does; the sentence is
            the reason.
    """

    def __init__(self, model: Any, rows: int, slots: int, *, int8: bool = False) -> None:
        self._check_kind(model)
        self._library = library()
        if self._library.mars_model_bytes() != ctypes.sizeof(_Model) + ctypes.sizeof(_Layer):
            raise MarsError("the compiled CPU kernels and their Python side disagree")
        vector = self._library.mars_vector()
        config, attention = model.config, model.base_model.layers[0].self_attn
        head_dim = attention.head_dim
        if head_dim % vector:
            raise MarsError(f"its heads' size ({head_dim}) is no multiple of {vector}")
        self.model, self.device, self.dtype = model, torch.device("cpu"), torch.float32
        self.weights = "int8" if int8 else str(model.dtype)
        self._embed = model.get_input_embeddings().weight.detach().contiguous()
        kind = _kind(model.dtype, int8, head_dim, self._library)
        self._weights = weights = _pack(model, vector, kind)
        self.one_product = 64 if kind in _IN_TILES else 26
        self.tokens_a_pass = 32 if kind == _TILES else 0
        kv_heads = config.num_key_value_heads
        self.cache = NativeCache(len(weights.layers), rows, slots, kv_heads, head_dim, vector, kind)
        self._layers = (_Layer * len(weights.layers))(*weights.layers)
        for layer, keys, values in zip(self._layers, self.cache.keys, self.cache.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._model = _Model(
            layers=len(weights.layers),
            hidden=config.hidden_size,
            intermediate=weights.intermediate,
            q_heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            slots=self.cache.slots,
            eps=config.rms_norm_eps,
            scale=attention.scaling,
            weights=weights.kind,
            embedding=self._embed.data_ptr(),
            embedding_bytes=self._embed.element_size(),
            norm_final=weights.norm,
            cos=weights.cos,
            sin=weights.sin,
            layer=ctypes.addressof(self._layers),
        )
        queries = self._library.mars_queries(_Int(kind))
        self._own_size = queries * (self.cache.slots + 2 * head_dim)  # as `mars_forward` asks
        self._together = max(1, queries * kv_heads // config.num_attention_heads)  # tokens of a pass
        self._threads = _threads(weights.intermediate * config.hidden_size)
        self._scratch: list[Tensor] = []
        self._logits = torch.empty(0, weights.head.n)
        self.layers_seconds = 0.0  # of the last forward, without its logits
        self._own = torch.empty(0)
        if not weights.checked:
            self._check_result()
            weights.checked = True

    def hidden(self, feed: Feed) -> Tensor:
        """Run the layers, write the tokens' keys and values: the last hidden states, float32 [N, hidden]."""
        return self.decode(feed, np.zeros(0, dtype=np.int64), None)[0]

    def decode(self, feed: Feed, read: np.ndarray, never: int | None) -> tuple[Tensor, Tensor, np.ndarray]:
        """`hidden`; `logits` of its tokens `read`, int64 [M], with -inf for `never`; their `best_tokens`.

        The logits are good until the next call.
        """
        if len(self._logits) < len(read):
            self._logits = torch.empty(len(read), self._weights.head.n)
        logits, best = self._logits[: len(read)], np.empty(len(read), dtype=np.int64)
        tokens, threads, head = len(feed.input_ids), self._threads, self._weights.head
        groups = _groups(feed.width.tolist(), self._together, self._model.kv_heads, threads)
        x = torch.empty(tokens, self._model.hidden)
        arrays = [
            np.ascontiguousarray(values, dtype=np.int64)
            for values in (
                feed.input_ids,
                np.repeat(feed.rows, feed.width),
                feed.slots,
                feed.position_ids,
                feed.sees_before,
                feed.sees_from,
                groups,
                read,
            )
        ]
        *fed, read = arrays
        scratch = (buffer.data_ptr() for buffer in self._buffers(max(tokens, len(read)), threads))
        self.layers_seconds = self._library.mars_decode(
            ctypes.byref(self._model),
            ctypes.byref(_Feed(*(values.ctypes.data for values in fed), tokens, len(groups) - 1)),
            ctypes.byref(_Scratch(x.data_ptr(), *scratch, self._own_size)),
            ctypes.byref(head),
            _Pointer(read.ctypes.data),
            _Int(len(read)),
            _Pointer(logits.data_ptr()),
            _Int(-1 if never is None else never),
            _Pointer(best.ctypes.data),
            _Int(threads),
        )
        return x, logits, best

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [M, vocabulary] of hidden states [M, hidden]."""
        hidden, head, threads = hidden.contiguous(), self._weights.head, self._threads
        logits, scratch = torch.empty(len(hidden), head.n), torch.empty(len(hidden), head.k)
        self._library.mars_linear(
            ctypes.byref(head),
            _Int(self._weights.kind),
            _Pointer(hidden.data_ptr()),
            _Int(hidden.shape[1]),
            _Int(len(hidden)),
            _Pointer(logits.data_ptr()),
            _Pointer(scratch.data_ptr()),
            _Int(threads),
        )
        return logits

    def probability(self, logits: Tensor, tokens: np.ndarray) -> np.ndarray:
        """float32 [M]: softmax(logits [M, vocabulary]) of each row's token, int64 [M]."""
        logits, tokens = logits.contiguous(), np.ascontiguousarray(tokens, dtype=np.int64)
        found = np.empty(len(tokens), dtype=np.float32)
        self._library.mars_probability(
            _Pointer(logits.data_ptr()),
            _Int(logits.shape[1]),
            _Pointer(tokens.ctypes.data),
            _Int(len(tokens)),
            _Pointer(found.ctypes.data),
            _Int(self._threads),
        )
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights that a forward and its logits read; not the embedding, nor the rotations.

        Of those two a forward reads a row for each token.
        """
        weights = self._weights
        every = (t for t in weights.kept if t.data_ptr() not in (weights.cos, weights.sin))
        return sum(t.numel() * t.element_size() for t in every)

    def _buffers(self, tokens: int, threads: int) -> list[Tensor]:
        """The kernels' scratch, kept from forward to forward and grown where one needs more."""
        model = self._model
        if not self._scratch or len(self._scratch[0]) < tokens:
            heads = model.q_heads + 2 * model.kv_heads
            self._scratch = [
                torch.empty(tokens, width)
                for width in (
                    max(self._layers[0].qkv.k, model.intermediate),
                    max(heads * model.head_dim, self._layers[0].out.k),
                    model.q_heads * model.head_dim,
                    max(model.intermediate, model.hidden),
                    -(-model.hidden // (2 * self._weights.vector)),
                )
            ]
        if len(self._own) < threads * self._own_size:
            self._own = torch.empty(threads * self._own_size)
        return [*self._scratch, self._own]

    @staticmethod
    def _check_kind(model: Any) -> None:
        config = model.config
        if next(model.parameters()).device.type != "cpu":
            raise MarsError("it is not on the CPU")
        if model.dtype not in TOLERANCE:
            raise MarsError(f"its weights are {str(model.dtype).removeprefix('torch.')}")
        if config.model_type not in KERNEL_FAMILIES or config.hidden_act != "silu":
            raise MarsError(
                f"the kernels know {', '.join(KERNEL_FAMILIES)} models, and this is {config.model_type}"
            )
        plain = torch.nn.Linear
        linears = [
            m for m in model.base_model.layers.modules() if not list(m.children()) and hasattr(m, "weight")
        ]
        # A library that quantises may leave the module and put a tensor of its own kind in its place.
        if any(type(m) is not plain and m.weight.dim() > 1 for m in linears) or any(
            parameter.device.type == "meta" or type(parameter) is not torch.nn.Parameter
            for parameter in model.parameters()
        ):
            raise MarsError("its weights are quantised, or an adapter is still beside them")

    @torch.inference_mode()
    def _check_result(self) -> None:
        """Compare with transformers' own forward on a few tokens: a variant of the family would differ."""
        count = min(8, self.cache.slots // 2, self.model.config.max_position_embeddings)
        ids = np.arange(count) * 7 % self._embed.shape[0]
        ours = self.logits(self.hidden(Feed.of_one_row(ids)))
        with alone_with(self.model):
            theirs = self.model(torch.from_numpy(ids)[None], use_cache=False).logits[0].float()
        if not bool(theirs.isfinite().all()):
            raise MarsError("its logits are no numbers, also from transformers' own modules")
        error = float((ours - theirs).norm() / theirs.norm())
        tolerance = INT8_TOLERANCE if self._weights.kind in _EIGHT_BITS else TOLERANCE[self.model.dtype]
        if not error < tolerance:
            raise MarsError(f"the kernels' logits differ from transformers' by {error:.1%}")
