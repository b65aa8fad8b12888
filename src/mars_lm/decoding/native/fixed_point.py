"""bfloat16 weights as whole numbers of 16 bits, whose products cost half of what those of floats cost."""

from __future__ import annotations

import torch
from torch import Tensor

from mars_lm.int8 import GROUP

BITS = 12  # of a weight, beside its sign
AT_ONCE = 2**22  # weights, so that a large matrix is never whole in float32


def fixed_point(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as int16 times a power of two for each group of inputs.

    A group's largest weight keeps four bits more than bfloat16 has, so every weight down to a sixteenth of
    it is the bfloat16 one exactly, and a smaller one is within 2^-13 of the largest one's power of two. Sums
    of a group's products with whole numbers of 13 bits and a sign fit in 32 bits.

    Args:
        weight: bfloat16 [n, k], finite; k a multiple of GROUP.
    Returns:
        int16 [n, k]; uint8 [n, k / GROUP], the exponent bits of the powers of two as float32 (0: zero).
    """
    parts = [_fixed_point(part) for part in weight.detach().split(max(AT_ONCE // weight.shape[1], 1))]
    whole, bits = zip(*parts, strict=True)
    return torch.cat(whole), torch.cat(bits)


def _fixed_point(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    _, exponent = torch.frexp(groups.abs().amax(dim=2))  # the largest is below 2^exponent
    bits = exponent - BITS + 127
    whole = torch.ldexp(groups, (BITS - exponent)[..., None]).round()
    known = (bits > 0) & (groups != 0).any(dim=2)  # a group of less than 2^-115 is nothing
    whole = torch.where(known[..., None], whole, 0).flatten(1)
    return whole.to(torch.int16), torch.where(known, bits, 0).to(torch.uint8)
