"""The live knob: the server's decoding defaults, and the controller that turns τ with the load."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings, Rule, check_block_size, default_tau

logger = logging.getLogger("mars_lm.serving")


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What a request that names nothing of its own decodes with, right now."""

    tau: float
    rule: Rule
    block_size: int | None
    exact: bool
    adaptive: bool | None = None


FIELDS = tuple(field.name for field in dataclasses.fields(Defaults))


class Knob:
    """The server's live defaults.

    Changed by one thread (the event loop) and read by another (the engine's): `defaults` is replaced whole,
    and a reader keeps the object that it got.

    Args:
        defaults: what to start with.
        trained_block_size: the checkpoint's B; None for a model without MARS settings.
        on_change: called with who changed it, after each change.
    """

    def __init__(
        self,
        defaults: Defaults,
        trained_block_size: int | None,
        *,
        controller: LoadController | None = None,
        on_change: Callable[[str], None] = lambda by: None,
    ) -> None:
        self.trained_block_size = trained_block_size
        self.controller = controller
        self.controller_on = controller is not None
        self.on_change = on_change
        self.defaults = self._checked(defaults)

    def change(self, by: str, changes: Mapping[str, Any]) -> Defaults:
        """Set some of the fields; in force at the next forward of requests that did not choose their own.

        Args:
            by: "admin" or "controller", for the log and the count.
            changes: fields of `Defaults`. Where rule or exact changes and τ is not named, τ becomes the new
                mode's own default: a threshold of one rule means nothing to another.
        Raises:
            MarsError: a value is out of range, or the checkpoint was not trained for it.
        """
        before = self.defaults
        self.defaults = after = self._checked(Defaults(**self._merged(before, changes)))
        if after != before:
            told = ", ".join(
                f"{name} {getattr(before, name)} -> {getattr(after, name)}"
                for name in FIELDS
                if getattr(before, name) != getattr(after, name)
            )
            logger.log(logging.DEBUG if by == "controller" else logging.INFO, "settings by %s: %s", by, told)
            self.on_change(by)
        return after

    def resolve(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """A request's own choice over the defaults of this moment, as fields of `DecodingSettings`."""
        return self._merged(self.defaults, chosen)

    def tick(self, now: float, running: float, waiting: float) -> None:
        """Let the controller, if there is one and it is on, look at the load and turn τ.

        Args:
            now: a clock in seconds. running: occupied rows as a share of all. waiting: requests in the queue.
        """
        if self.controller is None or not self.controller_on:
            return
        tau = self.controller.tau(now, running, waiting, self.defaults.rule)
        if tau != self.defaults.tau:
            self.change("controller", {"tau": tau})

    def _merged(self, base: Defaults, chosen: Mapping[str, Any]) -> dict[str, Any]:
        values = {**dataclasses.asdict(base), **chosen}
        moved = values["rule"] != base.rule or values["exact"] != base.exact
        if moved and "tau" not in chosen:
            # A model that knows no masks decodes one token at a time, exact or not.
            ordinary = self.trained_block_size is None and values["rule"] == "probability"
            values["tau"] = 1.0 if ordinary else default_tau(values["rule"], exact=values["exact"])
        return values

    def _checked(self, defaults: Defaults) -> Defaults:
        settings = DecodingSettings(**dataclasses.asdict(defaults))
        if self.trained_block_size is None:
            if not settings.one_token:
                raise MarsError(
                    "This model was not trained for MARS decoding: its only setting is tau 1 with the rule "
                    "'probability'."
                )
        else:
            check_block_size(defaults.block_size, self.trained_block_size)
        return defaults


class LoadController:
    """The emptier the server, the more careful its default τ (SPEC 6).

    Load is the share of occupied rows plus the queue's length over `target_queue`. Up to `QUIET` τ is at
    its careful bound, from `BUSY` on at its fast one, and between them in proportion. What keeps it from
    hunting: a queue adds up what τ lets pass, so a τ that answered late would swing with it; the load is
    smoothed only briefly against that (a little longer when it falls), τ is a straight line of it, without a
    memory of its own, and it moves once the line is a `STEP` away.

    Args:
        low, high: the bounds of τ.
        target_queue: waiting requests at which τ is at its fast bound.
    """

    QUIET, BUSY = 0.5, 2.0
    RISE_SECONDS, FALL_SECONDS = 2.0, 4.0
    STEP = 1 / 128  # of the way between the bounds

    def __init__(self, low: float, high: float, target_queue: int) -> None:
        if not 0 <= low <= high:
            raise MarsError(f"--tau-range is {low:g}:{high:g}, expected LOW:HIGH, such as 0.6:1.0.")
        if target_queue < 1:
            raise MarsError(f"--target-queue is {target_queue}, expected 1 or more.")
        self.low, self.high, self.target_queue = low, high, target_queue
        self.load = 0.0
        self.position = 0.0  # 0: careful, 1: fast
        self._last: float | None = None

    def tau(self, now: float, running: float, waiting: float, rule: Rule) -> float:
        """The default τ for the load of this moment.

        Args:
            now: a clock in seconds. running: occupied rows as a share of all. waiting: requests in the queue.
            rule: in force; for `entropy`, where a larger τ lets more pass, the bounds change places.
        """
        load = running + waiting / self.target_queue
        elapsed = 0.0 if self._last is None else max(now - self._last, 0.0)
        self._last = now
        smoothing = self.RISE_SECONDS if load > self.load else self.FALL_SECONDS
        self.load += (load - self.load) * -math.expm1(-elapsed / smoothing)
        wanted = min(max((self.load - self.QUIET) / (self.BUSY - self.QUIET), 0.0), 1.0)
        if abs(wanted - self.position) >= self.STEP or wanted in (0.0, 1.0):
            self.position = wanted
        careful, fast = (self.low, self.high) if rule == "entropy" else (self.high, self.low)
        return careful + (fast - careful) * self.position
