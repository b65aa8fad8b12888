"""How many masks pay: chosen from what steps cost here and from what drafts have been worth.

A mask costs a query position, and so does a draft that it gives. While a machine waits for memory they are
nearly free; with many requests in a step they are not, and then fewer masks are faster, or none.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

_MEMORY = 20  # a bucket's average follows the last so many steps
_STALL = 4.0  # a step that took so many times what was expected met something else than its tokens
_BETTER = 1.03  # a width must promise so much more than the one in use
_ENOUGH = 3  # so many steps tell what steps of a size cost
_FIRST_SLOPE = 1 / 16  # before anything is known: so many tokens more double a step
_PROBE_EVERY, _PROBE_STEPS = 512, 8  # with no masks in use, one request carries some for a few steps


class StepCost:
    """Seconds of a step by the tokens that it feeds: along the averages seen, beyond them by their slope."""

    def __init__(self) -> None:
        self._buckets: dict[
            int, tuple[float, float, int]
        ] = {}  # log2 of tokens, in halves -> tokens, seconds, n

    def observe(self, tokens: int, seconds: float) -> None:
        """One step that only decoded."""
        bucket = _bucket(tokens)
        x, y, n = self._buckets.get(bucket, (0.0, 0.0, 0))
        if n and seconds > _STALL * y:
            return
        share = 1 / min(n + 1, _MEMORY)
        self._buckets[bucket] = (x + share * (tokens - x), y + share * (seconds - y), n + 1)

    def knows(self, tokens: int) -> bool:
        """Whether steps of about so many tokens were seen often enough."""
        return self._buckets.get(_bucket(tokens), (0.0, 0.0, 0))[2] >= _ENOUGH

    def of(self, tokens: float) -> float:
        """Expected seconds of a step; 1 + tokens / 16 of an unknown unit before the first was seen."""
        if not self._buckets:
            return 1 + _FIRST_SLOPE * tokens
        x, y = np.array(sorted((x, y) for x, y, _ in self._buckets.values())).T
        y = np.maximum.accumulate(y)  # more tokens never cost less, whatever the noise says
        if x[0] <= tokens <= x[-1]:
            return float(np.interp(tokens, x, y))
        end = 0 if tokens < x[0] else -1
        slope = (
            (y[-1] - y[0]) / (x[-1] - x[0]) if len(x) > 1 else y[0] * _FIRST_SLOPE / (1 + _FIRST_SLOPE * x[0])
        )
        return float(max(y[end] + slope * (tokens - x[end]), 0.1 * y[end]))


def _bucket(tokens: int) -> int:
    return round(2 * math.log2(tokens))


class WidthController:
    """Chooses the number of masks behind each request's drafts.

    Args:
        widest: B - 1.
    """

    def __init__(self, widest: int) -> None:
        self.widest = widest
        self.cost = StepCost()
        # Share of mask groups of which at least the first i guesses were accepted; a hopeful start, so that
        # every width is tried while requests are few.
        self._worth = {exact: [0.8 ** (i + 1) for i in range(widest)] for exact in (True, False)}
        self._in_use = {True: widest, False: widest}
        self._idle = 0

    def observe_accepted(self, exact: bool, offered: int, accepted: int) -> None:
        """How many guesses of the masks offered together were accepted."""
        worth = self._worth[exact]
        for i in range(min(offered, self.widest)):
            worth[i] += 0.02 * ((accepted > i) - worth[i])

    def width(self, exact: bool, requests: int) -> int:
        """The number of masks that promises the most tokens per second with so many requests in a step."""
        if not self.cost.knows(requests):
            return 0  # first what AR costs at this load: everything is measured against it
        rates = [self._rate(exact, w, requests) for w in range(self.widest + 1)]
        best = int(np.argmax(rates))
        if rates[best] > _BETTER * rates[self._in_use[exact]]:
            self._in_use[exact] = best
        return self._in_use[exact]

    def probe(self) -> bool:
        """Called once a step: whether one request shall carry masks even if none pay, so that we learn."""
        if any(self._in_use.values()):
            self._idle = 0
            return False
        self._idle += 1
        return self._idle % _PROBE_EVERY >= _PROBE_EVERY - _PROBE_STEPS

    def _rate(self, exact: bool, width: int, requests: int) -> float:
        """Tokens per second of one request among so many, if all had this width."""
        held = list(itertools.accumulate(self._worth[exact][:width], min))
        accepted = sum(held)
        if exact:
            # A step verifies a draft unless the step before rejected one, whose masks then were void.
            drafting = 1 / (2 - held[-1]) if width else 0.0
            tokens, fed = 1 + drafting * accepted, 1 + width + drafting * width
        else:
            tokens, fed = 1 + accepted, 1 + width + accepted
        return tokens / self.cost.of(requests * fed)
