"""The fused LoRA layer computes what PEFT's computes, and leaves to PEFT what it does not."""

from __future__ import annotations

import peft
import pytest
import torch

from mars_lm.training.lora_linear import FusedLoraLinear, _LoraProduct, fuse_lora
from tiny import tiny_model


def adapted(family: str = "qwen2", **options):
    """A tiny model with biases and a LoRA adapter whose both matrices are random."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM", **options
    )
    model = peft.get_peft_model(tiny_model(family), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    return model.train()


def logits_and_gradients(model, autocast: bool = False):
    ids = torch.arange(2 * 9).view(2, 9) * 7 % 300
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(inputs_embeds=embedded, use_cache=False).logits
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(logits.square().mean(), [embedded, *trained.values()])
    return logits.detach(), dict(zip(["input", *trained], gradients, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi"])
def test_logits_and_gradients_are_pefts(family):
    model = adapted(family).double()
    expected = logits_and_gradients(model)
    assert fuse_lora(model) == sum(isinstance(m, FusedLoraLinear) for m in model.modules()) > 0
    fused = logits_and_gradients(model)
    torch.testing.assert_close(fused, expected)


def test_every_layer_of_the_plain_case_is_fused(monkeypatch):
    model = adapted()
    layers, calls = fuse_lora(model), []
    apply = _LoraProduct.apply
    monkeypatch.setattr(_LoraProduct, "apply", lambda *given: calls.append(1) or apply(*given))
    logits_and_gradients(model)
    assert len(calls) == layers


def test_gradients_against_finite_differences():
    torch.manual_seed(0)
    shapes = [(2, 3, 5), (4, 5), (4,), (2, 5), (4, 2)]
    x, weight, bias, down, up = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    trained = [tensor.requires_grad_() for tensor in (x, down, up)]
    assert torch.autograd.gradcheck(lambda x, a, b: _LoraProduct.apply(x, weight, bias, a, b, 1.7), trained)


def test_under_autocast_it_is_as_near_to_float32_as_pefts():
    model = adapted()
    _, exact = logits_and_gradients(model)
    _, pefts = logits_and_gradients(model, autocast=True)
    fuse_lora(model)
    logits, ours = logits_and_gradients(model, autocast=True)
    assert logits.dtype == torch.bfloat16
    assert {gradient.dtype for gradient in ours.values()} == {torch.float32}

    def error(gradients):
        return sum((gradients[name] - exact[name]).norm() / exact[name].norm() for name in exact)

    assert error(ours) < 1.5 * error(pefts)


@pytest.mark.parametrize(
    "options", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}], ids=lambda o: next(iter(o))
)
def test_what_is_not_plain_is_left_to_peft(options, monkeypatch):
    model = adapted(**options)
    torch.manual_seed(1)
    expected = logits_and_gradients(model)
    fuse_lora(model)
    monkeypatch.setattr(_LoraProduct, "apply", lambda *given: pytest.fail("not the plain case"))
    torch.manual_seed(1)
    torch.testing.assert_close(logits_and_gradients(model), expected, rtol=0, atol=0)


def test_an_adapter_that_is_off_or_merged_counts_once_or_not_at_all():
    model = adapted().eval()
    fuse_lora(model)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        on = model(ids).logits
        with model.disable_adapter():
            off = model(ids).logits
        model.merge_adapter()
        merged = model(ids).logits
        model.unmerge_adapter()
        plain = model.merge_and_unload()(ids).logits
    assert not torch.allclose(on, off, atol=1e-2)
    torch.testing.assert_close(merged, on, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain, on, rtol=1e-4, atol=1e-5)
