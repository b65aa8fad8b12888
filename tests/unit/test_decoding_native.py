"""The CPU kernels against transformers' own modules, and against themselves in other company."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decoding_reference import feed
from mars_lm.decoding import Engine, generate
from mars_lm.decoding.executors import make_forward
from mars_lm.decoding.forward import Feed, ModelForward
from mars_lm.decoding.native import build
from mars_lm.decoding.native import fixed_point as fixed_point_module
from mars_lm.decoding.native import forward as native
from mars_lm.decoding.native.fixed_point import fixed_point
from mars_lm.decoding.native.forward import (
    _BFLOAT16,
    _FLOAT32,
    _INT8,
    _INT8_TILES,
    _INT16,
    _TILES,
    NativeForward,
)
from mars_lm.decoding.width import forward_cost
from mars_lm.errors import MarsError
from mars_lm.int8 import quantized, round_weights
from mars_lm.settings import DecodingSettings
from tiny import tiny_checkpoint

try:
    build.library()
except MarsError as error:
    pytest.skip(str(error), allow_module_level=True)

KINDS = {
    "llama": {},
    "llama, a head for each query": {"num_key_value_heads": 4},
    "llama, sizes that fill no vector": {"hidden_size": 40, "intermediate_size": 50},
    "llama, scaled positions": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    },
    "mistral": {},
    "qwen2": {},  # biases in front of the attention
    "qwen3": {},  # norms of each head
}


# What the kernels know weights as, and shapes that fill their units: groups of 64, tiles of 32.
WEIGHTS = {
    "float32": _FLOAT32,
    "bfloat16": _BFLOAT16,
    "int16": _INT16,
    "tiles": _TILES,
    "int8": _INT8,
    "int8, tiles": _INT8_TILES,
}
SHAPES = {
    "tiles": {"head_dim": 32},
    "int8": {"hidden_size": 64, "intermediate_size": 100},
    "int8, tiles": {"hidden_size": 64, "intermediate_size": 100, "head_dim": 32},
}
BFLOAT16 = ("bfloat16", "int16", "tiles")


@pytest.fixture
def weighing(monkeypatch):
    """A checkpoint whose engine computes with such weights, whatever is fastest on this processor."""

    def make(weights: str, **overrides):
        if "tiles" in weights and not build.library().mars_has_tiles():
            pytest.skip("this processor has no tiles")
        monkeypatch.setattr(native, "_kind", lambda *_: WEIGHTS[weights])
        dtype = torch.bfloat16 if weights in BFLOAT16 else torch.float32
        made = native_checkpoint(dtype=dtype, **{**SHAPES.get(weights, {}), **overrides})
        return dataclasses.replace(made, int8="int8" in weights)

    return make


def native_checkpoint(kind: str = "llama", dtype: torch.dtype = torch.float32, **overrides):
    made = tiny_checkpoint(kind.split(",")[0], **{"head_dim": 16, **KINDS[kind], **overrides})
    made.model.to(dtype)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_transformers_own(kind):
    checkpoint = native_checkpoint(kind)
    ids = torch.randint(0, 300, (1, 90), generator=torch.Generator().manual_seed(1))
    forward = NativeForward(checkpoint.model, 2, 100)
    with torch.inference_mode():
        expected = checkpoint.model(ids).logits[0]
        logits = forward.logits(forward.hidden(Feed.of_one_row(ids[0].numpy())))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("gain", [10.0, 100.0, 1e4])
def test_gates_of_any_size_are_transformers_own(gain):
    """e^x leaves float32 at 88: far below that a gate is shut, not wide open."""
    checkpoint = native_checkpoint()
    with torch.no_grad():
        for layer in checkpoint.model.base_model.layers:
            layer.mlp.gate_proj.weight.mul_(gain)
    ids = torch.arange(40)[None] * 7 % 300
    forward = NativeForward(checkpoint.model, 1, 64)
    with torch.inference_mode():
        expected = checkpoint.model(ids).logits[0]
        logits = forward.logits(forward.hidden(Feed.of_one_row(ids[0].numpy())))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def holes(sees=True):
    """Two rows, masks that skip slots, a block that sees ahead; or the same without holes."""
    ids = [int(i) for i in torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(2))]
    ahead, skips = {3: (21, 23), 4: (21, 23), 5: (22, 25)}, {0: (11, 7), 1: (11, 8), 2: (11, 9), 3: (11, 10)}
    return [
        feed((0, ids[:20], 0), (2, ids[5:8], 0)),
        feed((0, ids[20:26], 20), (2, ids[8:12], 3), sees=ahead if sees else {}),
        feed((2, ids[12:16], 7), sees=skips if sees else {}),
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rows_holes_and_groups_are_seen_as_the_torch_forward_sees_them(kind):
    """The same hidden states from both forwards."""
    checkpoint = native_checkpoint(kind)
    native, plain = NativeForward(checkpoint.model, 3, 64), ModelForward(checkpoint.model, 3, 64)
    with torch.inference_mode():
        for step in holes():
            torch.testing.assert_close(native.hidden(step), plain.hidden(step), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tiles_see_the_same(weighing, kind):
    """Up to rounding, which is far less than what it would be to see other slots."""
    weighing("tiles")
    checkpoint = native_checkpoint(kind, torch.bfloat16, **SHAPES["tiles"])
    forward = NativeForward(checkpoint.model, 3, 64)
    float32 = copy.deepcopy(checkpoint.model).float()
    plain, blind = ModelForward(float32, 3, 64), ModelForward(float32, 3, 64)
    with torch.inference_mode():
        for step, other in zip(holes(), holes(sees=False), strict=True):
            expected, without = plain.hidden(step), blind.hidden(other)
            error, change = (
                (found - expected).norm(dim=1) / expected.norm(dim=1)
                for found in (forward.hidden(step), without)
            )
            assert error.max() < 0.03
            assert change.max() > 0.3 or step.sees_before.tolist() == other.sees_before.tolist()


@pytest.mark.parametrize("tokens", [1, 2, 7, 13, 14, 26, 27, 60])
@pytest.mark.parametrize("size", [192, 200])
@pytest.mark.parametrize(("weights", "steps"), [("int8", 127), ("int16", 8191)])
def test_products_of_whole_numbers_are_their_groups_sums(weighing, weights, steps, size, tokens):
    """Against a slow count in whole numbers; what is multiplied is rounded in groups, as the weights are."""
    checkpoint = weighing(weights, hidden_size=size, num_attention_heads=4)
    forward = NativeForward(checkpoint.model, 1, 16, int8=checkpoint.int8)
    x = torch.randn(tokens, size, generator=torch.Generator().manual_seed(tokens)) * 3
    x[0, :64] = 0.0
    matrix = torch.nn.functional.pad(
        checkpoint.model.get_output_embeddings().weight.detach(), (0, -size % 64)
    )
    if weights == "int8":
        whole, scale = quantized(matrix)
    else:
        whole, bits = fixed_point(matrix)
        scale = torch.where(bits > 0, torch.exp2(bits.double() - 127), 0)
    expected = torch.zeros(tokens, len(whole), dtype=torch.float64)
    for group in range(matrix.shape[1] // 64):
        part = x[:, 64 * group : 64 * group + 64]
        part = torch.nn.functional.pad(part, (0, 64 - part.shape[1]))
        top = part.abs().amax(dim=1, keepdim=True)
        times = torch.where(
            top > 0, torch.full_like(top, steps).div(top), 0
        )  # float32, as the kernels have it
        rounded = (part.double() * times.double()).round()
        sums = rounded @ whole[:, 64 * group : 64 * group + 64].double().T
        assert torch.equal(sums, sums.round())
        expected += sums * (top / steps).double() * scale[:, group].double()
    atol = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(forward.logits(x).double(), expected, rtol=0, atol=atol)
    x[-1, 100] = float("nan")
    assert forward.logits(x)[-1].isnan().all()
    assert not forward.logits(x)[:-1].isnan().any()


@pytest.mark.parametrize("vocabulary", [320, 333])
def test_probabilities_are_the_softmax(vocabulary):
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(0)) * 10
    logits[0, 7], logits[1, 3], logits[2, 9] = -torch.inf, 500.0, torch.nan
    tokens = np.array([4, 5, 6, int(logits[3].argmax()), 8])
    found = NativeForward(native_checkpoint().model, 1, 16).probability(logits, tokens)
    expected = logits.softmax(-1)[torch.arange(5), torch.from_numpy(tokens)]
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_bfloat16_weights_are_kept_to_a_sixteenth_of_their_groups_largest():
    weight = torch.randn(50, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[0, :64], weight[1, 64] = 0.0, 1e-40
    weight[2], weight[3] = weight[2] * 1e30, weight[3] * 1e-30
    weight[4, :64] = 1e-39  # less than a scale can say
    whole, bits = fixed_point(weight)
    assert whole.abs().max() <= 4080
    values = torch.ldexp(whole.unflatten(1, (-1, 64)).double(), bits.int()[..., None] - 127).flatten(1)
    groups = weight.double().unflatten(1, (-1, 64))
    most = groups.abs().amax(2, keepdim=True)
    exact = (groups.abs() * 16 >= most) & (most > 1e-30)
    assert exact.double().mean() > 0.8
    error = (values.unflatten(1, (-1, 64)) - groups).abs()
    assert not error[exact].any()
    assert (error <= torch.clamp(most / 4096, min=1e-34)).all()


def test_a_large_matrix_is_rounded_in_parts(monkeypatch):
    weight = torch.randn(70, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = fixed_point(weight)
    monkeypatch.setattr(fixed_point_module, "AT_ONCE", 1000)
    for part, expected in zip(fixed_point(weight), whole, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_scratch_has_room_for_what_is_packed_into_it(weighing, weights):
    """The narrowest attention that the kernels take: a group of 64 is wider than all its heads."""
    checkpoint = weighing(
        weights, hidden_size=64, num_attention_heads=1, num_key_value_heads=1, intermediate_size=40
    )
    forward = NativeForward(checkpoint.model, 1, 16, int8=checkpoint.int8)
    normed, qkv, mixed, mlp, squares, _ = (buffer.shape[-1] for buffer in forward._buffers(3, 1))
    layer = forward._layers[0]
    assert normed >= max(layer.qkv.k, layer.gate_up.k)
    head_dim = checkpoint.model.config.head_dim
    assert qkv >= max(3 * head_dim, layer.out.k)
    assert mixed >= head_dim
    assert min(normed if weights in ("int8", "int8, tiles", "int16") else mlp, mlp) >= layer.down.k
    assert squares >= 64 / forward._library.mars_vector() / 2


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-37, 1e30])
def test_inputs_of_any_size_give_what_they_should(weighing, weights, size):
    checkpoint = weighing(weights, hidden_size=128)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    x[1] *= size
    x[2, 64:] *= size
    logits = NativeForward(checkpoint.model, 1, 16, int8=checkpoint.int8).logits(x)
    expected = x.double() @ checkpoint.model.get_output_embeddings().weight.detach().double().T
    whole = {"int16": 1e-3, "tiles": 0.005, "int8": 0.03, "int8, tiles": 0.03}
    tolerance = whole.get(weights, 1e-5)
    for row, right in zip(logits.double(), expected, strict=True):
        assert float((row - right).norm()) <= tolerance * float(right.norm()) + 1e-33


def test_the_largest_sums_of_whole_numbers_fit(weighing):
    """All weights and all inputs at their largest, of one sign: the sum of a group is next to 2^31."""
    checkpoint = weighing("int16", hidden_size=128)
    with torch.no_grad():
        checkpoint.model.get_output_embeddings().weight.fill_(1.9921875)  # 255 / 128: every bit is set
    forward = NativeForward(checkpoint.model, 1, 16)
    torch.testing.assert_close(
        forward.logits(torch.full((2, 128), 3.0)),
        torch.full((2, 320), 3.0 * 1.9921875 * 128),
        rtol=1e-5,
        atol=0,
    )


def test_bfloat16_weights_are_multiplied_as_the_processor_does_it_best():
    """As tiles where it has them and heads fill them, else as whole numbers, else as floats."""
    for tiles, int16, head_dim, kind in (
        (1, 1, 64, _TILES),
        (1, 1, 48, _INT16),
        (0, 1, 64, _INT16),
        (0, 0, 64, _BFLOAT16),
    ):
        kernels = SimpleNamespace(mars_has_tiles=lambda has=tiles: has, mars_has_int16=lambda has=int16: has)
        assert native._kind(torch.bfloat16, False, head_dim, kernels) == kind
        eight = _INT8_TILES if kind == _TILES else _INT8
        assert native._kind(torch.bfloat16, True, head_dim, kernels) == eight
        assert native._kind(torch.float32, False, head_dim, kernels) == _FLOAT32


@pytest.mark.parametrize("tokens", [1, 2, 13, 14, 16, 27, 60])
@pytest.mark.parametrize("size", [128, 200])
def test_products_in_eight_bits_have_the_same_bits_with_and_without_tiles(weighing, size, tokens):
    x = torch.randn(tokens, size, generator=torch.Generator().manual_seed(tokens))
    plain, tiles = (
        NativeForward(weighing(weights, hidden_size=size, head_dim=32).model, 1, 16, int8=True).logits(x)
        for weights in ("int8", "int8, tiles")
    )
    assert torch.equal(plain, tiles)


# What a model's logits may be off by, from the same weights in float32, and against transformers in bfloat16.
@pytest.mark.parametrize(
    ("weights", "most", "of_theirs"), [("bfloat16", 1e-5, 0.01), ("int16", 2e-3, 0.2), ("tiles", 0.05, 0.8)]
)
def test_bfloat16_is_nearer_to_float32_than_transformers_is(weighing, weights, most, of_theirs):
    checkpoint = weighing(weights, hidden_size=64, intermediate_size=100)
    ids = torch.randint(0, 300, (1, 60), generator=torch.Generator().manual_seed(3))
    forward = NativeForward(checkpoint.model, 1, 64)
    with torch.inference_mode():
        logits = forward.logits(forward.hidden(Feed.of_one_row(ids[0].numpy())))
        theirs = checkpoint.model(ids).logits[0].float()
        exact = checkpoint.model.float()(ids).logits[0]

    def error(values):
        return float((values - exact).norm() / exact.norm())

    assert error(logits) < most
    assert error(logits) < of_theirs * error(theirs)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 32, 33, 60])
@pytest.mark.parametrize("size", [192, 200])
def test_products_of_tiles_are_those_of_rounded_inputs(weighing, size, tokens):
    checkpoint = weighing("tiles", hidden_size=size)
    x = torch.randn(tokens, size, generator=torch.Generator().manual_seed(tokens)) * 3
    matrix = checkpoint.model.get_output_embeddings().weight.detach()
    expected = x.bfloat16().double() @ matrix.double().T
    forward = NativeForward(checkpoint.model, 1, 16)
    atol = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(forward.logits(x).double(), expected, rtol=0, atol=atol)
    x[-1, 100] = float("nan")
    assert forward.logits(x)[-1].isnan().all()
    assert not forward.logits(x)[:-1].isnan().any()


def test_int8_logits_are_those_of_modules_that_round_what_they_multiply(weighing):
    checkpoint = weighing("int8", hidden_size=128)
    forward = NativeForward(checkpoint.model, 2, 100, int8=True)
    round_weights(checkpoint.model)

    def rounded(module, inputs):
        groups = torch.nn.functional.pad(inputs[0], (0, -inputs[0].shape[-1] % 64)).unflatten(-1, (-1, 64))
        step = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (((groups / step).round() * step).flatten(-2)[..., : inputs[0].shape[-1]],)

    for module in checkpoint.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    ids = torch.randint(0, 300, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = checkpoint.model(ids).logits[0]
        logits = forward.logits(forward.hidden(Feed.of_one_row(ids[0].numpy())))
    # A value at a rounding's edge falls to its other side now and then.
    assert float((logits - expected).norm() / expected.norm()) < 0.01


def test_rounded_weights_are_rounded_once(weighing):
    checkpoint = weighing("int8")
    round_weights(checkpoint.model)
    before = [p.clone() for p in checkpoint.model.parameters()]
    round_weights(checkpoint.model)
    for old, new in zip(before, checkpoint.model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=0)
    weight = checkpoint.model.base_model.layers[0].mlp.up_proj.weight
    whole, scale = quantized(weight)
    assert whole.abs().max() == 127
    assert len(weight[0, :64].div(scale[0, 0]).round().unique()) > 10


def test_int8_and_whole_weights_of_one_model_are_kept_apart():
    """One model may be read in both: neither is packed again for the other, nor clocked with it."""
    checkpoint = native_checkpoint(**SHAPES["int8"])
    engines = [Engine(dataclasses.replace(checkpoint, int8=int8)) for int8 in (True, False, True, False)]
    packed = [engine._model._weights for engine in engines]
    assert packed[0] is packed[2] is not packed[1]
    assert packed[1] is packed[3]
    costs = [forward_cost(checkpoint.model, engine._model, 64) for engine in engines]
    assert costs[0] is costs[2] is not costs[1]
    assert costs[1] is costs[3]


def test_weights_that_are_no_numbers_are_named():
    checkpoint = native_checkpoint()
    with torch.no_grad():
        checkpoint.model.base_model.norm.weight[0] = torch.nan
    with pytest.raises(MarsError, match="its logits are no numbers"):
        NativeForward(checkpoint.model, 1, 16)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_bits_do_not_depend_on_the_threads_and_stay_in_their_buffers(weighing, weights, monkeypatch):
    """Small models run on one thread of their own accord: here on more, each buffer between two fences."""
    checkpoint = weighing(weights, hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    buffers, fences = NativeForward._buffers, []

    def fenced(self, tokens, threads):
        self._scratch = []
        made = []
        for buffer in buffers(self, tokens, threads):
            whole = torch.full((buffer.numel() + 128,), -7.0)
            fences.append((whole[:64], whole[-64:]))
            made.append(whole[64:-64].view(buffer.shape))
        return made

    monkeypatch.setattr(NativeForward, "_buffers", fenced)
    said = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(native, "_threads", lambda _, threads=threads: threads)
        forward = NativeForward(checkpoint.model, 1, 64, int8=checkpoint.int8)
        for tokens in (1, 14, 33):
            place = np.arange(tokens)
            of_one = Feed.of_one_row(place * 7 % 300)
            said.append((tokens, *(part.clone() for part in forward.decode(of_one, place, 0)[:2])))
    for tokens, *parts in said:
        first = next(known for known in said if known[0] == tokens)
        assert all(torch.equal(part, known) for part, known in zip(parts, first[1:], strict=True))
    assert all(bool((side == -7.0).all()) for fence in fences for side in fence)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_token_is_bit_equal_in_any_company(weighing, weights):
    """However the prompt is cut and whatever the other rows hold: the same bits, in every weight type."""
    checkpoint = weighing(weights)
    int8 = checkpoint.int8
    draw = random.Random(0)
    ids = [draw.randrange(300) for _ in range(50)]
    alone = NativeForward(checkpoint.model, 1, 64, int8=int8)
    with torch.inference_mode():
        expected = alone.logits(torch.cat([alone.hidden(feed((0, [t], i))) for i, t in enumerate(ids)]))
        for _ in range(8):
            forward, at, seen = NativeForward(checkpoint.model, 3, 64, int8=int8), 0, []
            other = 0
            while at < len(ids):
                size = min(draw.choice([1, 2, 3, 5, 8, 13, 21, 34]), len(ids) - at)
                noise = [draw.randrange(300) for _ in range(draw.choice([1, 2, 7]))]
                hidden = forward.hidden(feed((0, noise, other % 40), (1, ids[at : at + size], at)))
                seen.append(hidden[len(noise) :])
                at, other = at + size, other + len(noise)
            assert torch.equal(forward.logits(torch.cat(seen)), expected)


@pytest.mark.parametrize("recovery", [True, False])
@pytest.mark.parametrize("weights", ["int16", "tiles", "int8", "int8, tiles"])
def test_exact_mode_in_few_bits_says_what_one_token_mode_says(weighing, weights, recovery):
    """Random models tie often; without bit-equal logits some of these texts would part."""
    for seed in range(6):
        checkpoint = weighing(weights, seed=seed)
        draw = random.Random(seed)
        prompts = [[draw.randrange(300) for _ in range(draw.randrange(1, 40))] for _ in range(5)]
        exact = DecodingSettings(max_new_tokens=40, ignore_eos=True, recovery=recovery)
        alone = [
            generate(checkpoint, [prompt], DecodingSettings(tau=1.0, max_new_tokens=40, ignore_eos=True))[0]
            for prompt in prompts
        ]
        together = generate(checkpoint, prompts, exact, max_rows=3)
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_broken_row_leaves_the_others_alone_and_a_reused_row_clean(weighing, weights):
    checkpoint = weighing(weights)
    with torch.no_grad():
        checkpoint.model.get_input_embeddings().weight[8] = float("nan")
        checkpoint.model.get_output_embeddings().weight = torch.nn.Parameter(
            torch.randn(
                320, checkpoint.model.config.hidden_size, generator=torch.Generator().manual_seed(0)
            ).to(checkpoint.model.dtype)
        )
    engine = Engine(checkpoint, max_rows=2)
    settings = DecodingSettings(max_new_tokens=5, ignore_eos=True)
    forward = engine._model
    assert isinstance(forward, NativeForward)
    with torch.inference_mode():
        clean = forward.hidden(feed((1, [3, 4, 5], 0)))
        both = forward.hidden(feed((0, [3, 8, 5], 0), (1, [3, 4, 5], 0)))
        assert torch.isnan(both[1:3]).all()
        assert torch.equal(both[3:], clean)
        assert torch.equal(forward.hidden(feed((0, [3, 4, 5], 0))), clean)
    first = engine.add([3, 4, 5], settings)
    for _ in engine.stream():
        pass
    broken = engine.add([3, 8, 5], settings)
    for _ in engine.stream():
        pass
    assert engine.result(broken).finish_reason == "error"
    again = [engine.add([3, 4, 5], settings) for _ in range(2)]
    for _ in engine.stream():
        pass
    assert [engine.result(i).token_ids for i in again] == [engine.result(first).token_ids] * 2


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("length", [1, 21, 32, 33])
def test_a_copied_beginning_is_that_of_the_other_row(weighing, weights, length):
    checkpoint = weighing(weights)
    forward = NativeForward(checkpoint.model, 3, 64, int8=checkpoint.int8)
    ids = [int(i) for i in torch.randint(0, 300, (45,), generator=torch.Generator().manual_seed(2))]
    with torch.inference_mode():
        forward.hidden(feed((0, ids[:40], 0), (2, ids[5:45], 0)))
        forward.cache.copy_prefix(0, 2, length)
        both = forward.hidden(feed((0, ids[3:9], length), (2, ids[3:9], length)))
    assert torch.equal(both[:6], both[6:])


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_unseen_slot_that_is_broken_does_not_reach_a_token_of_the_same_pass(weighing, weights):
    """Tokens that share a pass over the values see different slots: 0 x NaN would be NaN."""
    checkpoint = weighing(weights)
    forward = NativeForward(checkpoint.model, 1, 64, int8=checkpoint.int8)
    with torch.no_grad():
        checkpoint.model.get_input_embeddings().weight[8] = float("nan")
    with torch.inference_mode():
        forward.hidden(feed((0, list(range(20, 40)), 0)))
        clean = forward.hidden(feed((0, [3, 4, 5], 20)))
        broken = forward.hidden(feed((0, [3, 4, 8, 5], 20), sees={3: (22, 23)}))
    assert torch.equal(broken[:2], clean[:2])
    assert torch.isnan(broken[2]).all()
    assert not torch.isnan(broken[3]).any()


def test_weights_changed_in_place_are_packed_anew():
    checkpoint = native_checkpoint()
    ids = np.arange(9)
    before = NativeForward(checkpoint.model, 1, 16)
    assert NativeForward(checkpoint.model, 1, 16)._weights is before._weights
    with torch.no_grad():
        checkpoint.model.base_model.layers[0].mlp.up_proj.weight.mul_(1.5)
    after = NativeForward(checkpoint.model, 1, 16)
    with torch.inference_mode():
        assert not torch.equal(after.hidden(Feed.of_one_row(ids)), before.hidden(Feed.of_one_row(ids)))


class ForeignTensor(torch.Tensor):
    """As libraries that quantise put in a weight's place: the shape of the weight, and not its memory."""


def foreign_checkpoint():
    made = native_checkpoint()
    layer = made.model.base_model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(ForeignTensor))
    return made


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        (lambda: tiny_checkpoint("gemma", head_dim=16), "the kernels know"),
        (lambda: tiny_checkpoint("llama"), "heads' size"),
        (lambda: native_checkpoint(attention_bias=True), "biases"),
        (lambda: native_checkpoint(dtype=torch.float16), "float16"),
        (lambda: foreign_checkpoint(), "quantised"),
    ],
)
def test_what_the_kernels_cannot_run_falls_back_or_is_refused_with_the_reason(checkpoint, reason, caplog):
    model = checkpoint().model
    with pytest.raises(MarsError, match=reason):
        make_forward(model, 1, 32, "native")
    with caplog.at_level(logging.INFO):
        assert isinstance(make_forward(model, 1, 32), ModelForward)
    assert reason in caplog.text
    with pytest.raises(MarsError, match="expected one of auto, native, torch"):
        make_forward(model, 1, 32, "fast")


def test_a_variant_that_computes_something_else_is_noticed():
    checkpoint = native_checkpoint()
    checkpoint.model.base_model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(MarsError, match="differ from transformers'"):
        make_forward(checkpoint.model, 1, 32, "native")


def test_a_compiler_that_fails_is_a_reason_too_and_is_not_asked_again(monkeypatch, caplog):
    try:
        for compiler, reason in (("no-such-compiler", "no C compiler"), ("false", "could not build")):
            build._library.cache_clear()
            caplog.clear()
            monkeypatch.setenv("CC", compiler)
            with pytest.raises(MarsError, match=reason):
                build.library()
            monkeypatch.delenv("CC")
            with pytest.raises(MarsError, match=reason):
                build.library()
            assert isinstance(make_forward(native_checkpoint().model, 1, 32), ModelForward)
            assert [r.levelname for r in caplog.records if reason in r.message].count("WARNING") == 1
    finally:
        build._library.cache_clear()
