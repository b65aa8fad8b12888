"""Confidence intervals: of a share, of a mean over prompts, and of a ratio of times."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Row = TypeVar("Row")

Z_95 = 1.959964  # two-sided 95%


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate with its 95% confidence interval."""

    value: float
    low: float
    high: float

    def percent(self) -> str:
        """Such as `31.8 [28.4, 35.5]`, in percent."""
        return f"{100 * self.value:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def wilson(right: int, total: int) -> Interval:
    """The binomial share of `right` in `total`, with Wilson's score interval."""
    if not total:
        return Interval(math.nan, 0.0, 1.0)
    share, square = right / total, Z_95**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = Z_95 * math.sqrt(share * (1 - share) / total + square / (4 * total**2)) / (1 + square / total)
    # At 0 and at 1 the interval ends there; rounding must not push it past.
    low = 0.0 if right == 0 else max(middle - half, 0.0)
    high = 1.0 if right == total else min(middle + half, 1.0)
    return Interval(share, low, high)


def of_mean(values: Sequence[float]) -> Interval:
    """A mean with its interval: Wilson's where all values are 0 or 1, else the normal one."""
    if all(value in (0, 1) for value in values):
        return wilson(round(sum(values)), len(values))
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    half = Z_95 * math.sqrt(variance / len(values))
    return Interval(mean, mean - half, mean + half)


def bootstrap(
    rows: Sequence[Row], statistic: Callable[[Sequence[Row]], float], *, draws: int = 1000, seed: int = 0
) -> Interval:
    """A statistic of rows with its percentile interval over rows drawn with replacement.

    Rows are what is independent: prompts, not their tokens; turns, not their requests.
    """
    generator = random.Random(seed)
    drawn = sorted(statistic(generator.choices(rows, k=len(rows))) for _ in range(draws))
    return Interval(statistic(rows), drawn[int(0.025 * draws)], drawn[min(int(0.975 * draws), draws - 1)])


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 of a single value), as over seeds."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
