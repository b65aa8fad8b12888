"""LoRA's linear layer in fewer passes over memory, for training on a CPU.

PEFT's layer makes the base's output, the adapter's, a scaled copy of it and their sum: four tensors of
[tokens x width] where matrix products that add onto their target (BLAS's beta) need one, forward and back.
A GPU hides such passes better, and there PEFT's own layer stays.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear


class _LoraProduct(torch.autograd.Function):
    """x Wᵀ + b + scaling · (x Aᵀ) Bᵀ and its gradients; W and b are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        narrow = rows @ down.t()
        out = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
        out.addmm_(narrow, up.t(), alpha=scaling)
        ctx.save_for_backward(rows, weight, down, up, narrow)
        ctx.scaling = scaling
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, down, up, narrow = ctx.saved_tensors
        shape = (*grad.shape[:-1], weight.shape[1])
        grad = grad.reshape(-1, grad.shape[-1])
        grad_narrow = (grad @ up).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_narrow, down).view(shape)
        grad_down = grad_narrow.t() @ rows
        grad_up = (grad.t() @ narrow).mul_(ctx.scaling)
        return grad_x, None, None, grad_down, grad_up, None


class FusedLoraLinear(Linear):
    """PEFT's LoRA layer with `_LoraProduct` for the plain case; every other case is PEFT's."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., in] floating point -> [..., out], in autocast's dtype where that is on, else the base's."""
        if args or kwargs or not self._is_plain(x):
            return super().forward(x, *args, **kwargs)
        name = self.active_adapters[0]
        base = self.get_base_layer()
        operands = [x, base.weight, base.bias, self.lora_A[name].weight, self.lora_B[name].weight]
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            operands = [None if operand is None else operand.to(dtype) for operand in operands]
        return cast(torch.Tensor, _LoraProduct.apply(*operands, self.scaling[name]))

    def _is_plain(self, x: torch.Tensor) -> bool:
        """One adapter of two matrices, neither merged nor off, on a frozen linear layer of x's dtype."""
        names = self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return False
        base, name = self.get_base_layer(), names[0]
        dropout = getattr(self.lora_dropout[name], "p", 0.0) if self.training else 0.0
        return (
            type(base) is torch.nn.Linear
            and x.device.type == "cpu"
            and not any(parameter.requires_grad for parameter in base.parameters())
            and not dropout
            and not self.lora_variant
            and not self.lora_bias[name]
            and (
                torch.is_autocast_enabled("cpu")
                or {x.dtype, base.weight.dtype} == {self.lora_A[name].weight.dtype}
            )
        )


def fuse_lora(model: torch.nn.Module) -> int:
    """Let PEFT's LoRA layers of a model compute as `FusedLoraLinear` does.

    Weights, names and what is saved stay PEFT's.

    Returns:
        How many layers there are of that kind.
    """
    layers = [module for module in model.modules() if type(module) is Linear]
    for layer in layers:
        layer.__class__ = FusedLoraLinear
    return len(layers)
