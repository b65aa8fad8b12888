"""Logits -> the candidate at each position: greedy, or drawn with noise that a seed and a position fix.

A draw is argmax(log p + Gumbel noise), and the noise is a hash of (seed, position, token). So the token at a
position is a function of the seed and the logits alone. A draft's token and AR's at the same position meet
the same noise and mostly agree where their distributions do; exact mode compares them as it compares greedy
ones. What is committed is always AR's own draw, so AR's distribution is untouched.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

# The noise comes from 32 random bits: it lies between -3.14 and 22.9, so a token that is further behind the
# best one than this can't win, and needs no noise.
REACH = 26.1
# The best token of logits that are no numbers.
NOT_NUMBERS = -2
# How many of the best tokens are looked at first, where top-p alone limits them.
NUCLEUS = 1024
_WRAP = 0xFFFFFFFFFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass
class Sampling:
    """How each of M positions is drawn; arrays [M]."""

    temperature: np.ndarray  # above 0
    top_k: np.ndarray  # 0: off
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray  # uint64
    position: np.ndarray  # int64, of the token that is drawn


def best_tokens(logits: Tensor) -> np.ndarray:
    """The most probable token of each position, the first of equal ones.

    Args:
        logits: float32 [M, V].
    Returns:
        int64 [M], `NOT_NUMBERS` where the logits hold NaN or nothing but infinities.
    """
    # Either maximum lets a NaN through, so its value also tells a broken row.
    if logits.device.type == "cpu":
        # numpy's takes a tenth of torch's time, and wakes no threads, which wait where others use the cores.
        values = logits.numpy()
        best = values.argmax(axis=-1)
        return np.where(np.isfinite(values[np.arange(len(values)), best]), best, NOT_NUMBERS)
    found = logits.max(dim=-1)
    return np.where(np.isfinite(found.values.cpu().numpy()), found.indices.cpu().numpy(), NOT_NUMBERS)


def sample(logits: Tensor, how: Sampling) -> Tensor:
    """One token of each position, from softmax(logits / temperature) cut by top-k, then top-p, then min-p.

    Tokens that tie with the last one kept are kept as well.

    Args:
        logits: float32 [M, V], finite or -inf.
    Returns:
        int64 [M].
    """
    device = logits.device
    temperature = np.maximum(how.temperature, 1e-4).astype(
        np.float32
    )  # below it nothing but the best is drawn
    scaled = logits / torch.from_numpy(temperature).to(device)[:, None]
    best = scaled.amax(-1, keepdim=True)
    least = torch.maximum(best - REACH, _least_kept(scaled, best, how))
    kept = scaled >= least
    key = torch.from_numpy(_keys(how.seed, how.position).view(np.int64)).to(device)
    if int(kept.sum()) * 8 > kept.numel():  # picking them out would cost more than the noise of all
        noisy = gumbel(key[:, None], torch.arange(kept.shape[1], device=device))
        return noisy.add_(scaled).masked_fill_(~kept, -torch.inf).argmax(-1)
    place, token = torch.nonzero(kept, as_tuple=True)
    noisy = torch.full(scaled.shape, -torch.inf, dtype=torch.float64, device=device)
    noisy[place, token] = gumbel(key[place], token).add_(scaled[place, token])
    return noisy.argmax(-1)


def gumbel(key: Tensor, token: Tensor) -> Tensor:
    """Gumbel noise of each token under its key: int64, float64, shapes as broadcast."""
    bits = _mix_tensor(key + token * _signed(int(_GOLDEN)))
    uniform = ((bits >> 32) & 0xFFFFFFFF).double().add_(0.5).div_(2.0**32)
    return uniform.log_().neg_().log_().neg_()


def _least_kept(scaled: Tensor, best: Tensor, how: Sampling) -> Tensor:
    """The lowest scaled logit [M, 1] that the filters keep; -inf where there are none."""
    device, size = scaled.device, scaled.shape[-1]
    least = torch.full_like(best, -torch.inf)
    if (how.min_p > 0).any():
        least = best + torch.from_numpy(_log(how.min_p)).to(device)[:, None]
    limited, nucleus = (how.top_k > 0) & (how.top_k < size), how.top_p < 1
    if not (limited | nucleus).any():
        return least
    k = np.where(limited, how.top_k, size)
    width = int(k[limited].max(initial=0))
    if (nucleus & ~limited).any():
        width = max(width, min(NUCLEUS, size))
    while True:
        top = scaled.topk(width, dim=-1).values  # descending
        # The mass of each row's first k, of which top-p keeps the least prefix that reaches its share.
        column = torch.arange(width, device=device)
        within = column < torch.from_numpy(k).to(device)[:, None]
        mass = torch.exp(top - best).masked_fill(~within, 0).double().cumsum(-1)
        # Summed in the same way whatever the width, so that a row's cut does not depend on other rows.
        all_mass = torch.exp(scaled - best).double().sum(-1, keepdim=True)
        whole = torch.where(torch.from_numpy(limited).to(device)[:, None], mass[:, -1:], all_mass)
        wanted = torch.from_numpy(how.top_p).to(device)[:, None] * whole
        wanted = wanted.masked_fill(torch.from_numpy(~nucleus).to(device)[:, None], torch.inf)
        before = torch.cat([mass.new_zeros(len(mass), 1), mass[:, :-1]], dim=-1)
        kept = (before < wanted) & within
        short = torch.from_numpy(nucleus & ~limited).to(device) & kept[:, -1]
        if width == size or not short.any():
            break
        width = size
    last = kept.sum(-1, keepdim=True) - 1
    cut = top.gather(-1, last)
    cut = cut.masked_fill(torch.from_numpy(~(limited | nucleus)).to(device)[:, None], -torch.inf)
    return torch.maximum(least, cut)


def _log(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(values).astype(np.float32)


def _keys(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """uint64 [M]: one for every (seed, position)."""
    return _mix(_mix(seed.astype(np.uint64) + _GOLDEN) + position.astype(np.uint64) * _GOLDEN)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every bit of the input moves every bit of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_tensor(x: Tensor) -> Tensor:
    """`_mix` on int64, which wraps, and whose right shift must be cleared of the sign."""
    x = (x ^ ((x >> 30) & (_WRAP >> 30))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (_WRAP >> 27))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (_WRAP >> 31))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
