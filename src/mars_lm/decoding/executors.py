"""Which forward runs a model: the CPU kernels where they can, transformers' own modules where they can't."""

from __future__ import annotations

import logging
from typing import Any

from mars_lm.decoding.forward import Forward, ModelForward
from mars_lm.decoding.invariant import InvariantForward
from mars_lm.errors import MarsError

KERNELS = ("auto", "native", "torch", "compile")

logger = logging.getLogger(__name__)


def make_forward(
    model: Any,
    rows: int,
    slots: int,
    kernels: str = "auto",
    invariant: bool = False,
    int8: bool = False,
) -> Forward:
    """The model with a cache of `rows` x `slots`.

    Args:
        kernels: "torch": transformers' modules, any model and device. "native": the C kernels, which stream
            the weights of a Llama-like model through a CPU. "auto": native if it can be, else torch.
            "compile": torch, its layers compiled first, which takes a while; where they can't be, a warning
            says why.
        invariant: a token's logits have the same bits in any company. The C kernels' always have;
            transformers' modules then work in products of one shape.
        int8: the C kernels compute in int8, and "auto" takes no others.
    Raises:
        MarsError: "native" was asked for and can't be; or no such choice.
    """
    if kernels not in KERNELS:
        raise MarsError(f"kernels is {kernels!r}, expected one of {', '.join(KERNELS)}.")
    if kernels == "compile":
        from mars_lm.decoding.compiled import CompiledForward, CompiledInvariantForward

        return (CompiledInvariantForward if invariant else CompiledForward)(model, rows, slots)
    if kernels != "torch" and (kernels == "native" or next(model.parameters()).device.type == "cpu"):
        try:  # the import in here tells `custom_generate` that a copy beside a checkpoint does without
            from mars_lm.decoding.native.forward import NativeForward

            return NativeForward(model, rows, slots, int8=int8)
        except (MarsError, ImportError) as error:
            if int8:
                raise MarsError(
                    f"int8 runs on the native kernels, and they can't run this model: {error}"
                ) from error
            if kernels == "native":
                raise MarsError(f"The native kernels can't run this model: {error}") from error
            logger.info("Decoding with transformers' own modules, not the native kernels: %s", error)
    return (InvariantForward if invariant else ModelForward)(model, rows, slots)
