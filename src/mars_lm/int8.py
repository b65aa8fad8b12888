"""Weights of eight bits: a scale for each group of inputs, which the CPU kernels read as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mars_lm.architectures import KERNEL_FAMILIES
from mars_lm.errors import MarsError

GROUP = 64  # inputs that share a scale


def check_config(config: Any) -> None:
    """Refuse by its configuration a model whose weights the int8 kernels can't read.

    Raises:
        MarsError: it is of another family.
    """
    if config.model_type not in KERNEL_FAMILIES:
        raise MarsError(
            f"int8 is for {', '.join(KERNEL_FAMILIES)} models, and this is {config.model_type}: load it in "
            "another dtype."
        )


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [n, k] as int8 [n, k] in -127 .. 127, and float32 scales [n, k / GROUP] to multiply them with.

    k is a multiple of GROUP.
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(dim=2) / 127
    whole = (groups / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round()
    return whole.flatten(1).to(torch.int8), scale


@torch.no_grad()
def round_weights(model: Any) -> None:
    """Round every linear weight of a causal LM, in place, to what its int8 form says.

    So whatever computes with the model, also transformers' own modules, sees the weights of the int8 kernels.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            size = module.weight.shape[1]
            whole, scale = quantized(torch.nn.functional.pad(module.weight, (0, -size % GROUP)))
            rounded = (whole.unflatten(1, (-1, GROUP)) * scale[..., None]).flatten(1)
            module.weight.copy_(rounded[:, :size])
