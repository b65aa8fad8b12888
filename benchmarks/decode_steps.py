"""A step's time: how fast it reads the weights, and how much of it the model's forward does not need."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from common import in_turn
from decode_part import Bench, Panel, Part, Row, bars, line_at
from mars_lm.decoding import Engine
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings

# Bytes a second that one-token mode reads of the weights, over those of a plain read.
BANDWIDTH_BAR = 0.5
# The share of a step outside the model's forward, by batch.
STEP_BARS = {1: 0.05, 16: 0.10}


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of one `Engine.step`, and of the model's layers and logits in it."""

    total: float
    layers: float
    logits: float

    @property
    def outside(self) -> float:
        """Of neither."""
        return self.total - self.layers - self.logits


class StepClock:
    """Times the steps of an engine; its model's methods are wrapped for good."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._spent = {"hidden": 0.0, "logits": 0.0}
        for name in self._spent:
            setattr(engine._model, name, self._timed(name, getattr(engine._model, name)))
        engine._model.decode = self._timed_decode(engine._model.decode)  # type: ignore[method-assign]

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self._spent[name] += time.perf_counter() - begun

        return timed

    def _timed_decode(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Layers and logits in one call: what it does by the two above is counted there."""

        def timed(*arguments: Any) -> Any:
            before, begun = sum(self._spent.values()), time.perf_counter()
            found = method(*arguments)
            own = time.perf_counter() - begun - (sum(self._spent.values()) - before)
            layers = getattr(self.engine._model, "layers_seconds", 0.0)
            self._spent["hidden"] += layers
            self._spent["logits"] += own - layers
            return found

        return timed

    def decode(self, prompts: list[list[int]], settings: DecodingSettings) -> list[Step]:
        """Decode the prompts together: the steps in which every one of them decoded, none was prefilled."""
        engine = self.engine
        numbers = [engine.add(prompt, settings) for prompt in prompts]
        decoding: set[int] = set()
        steps = []
        while engine.has_work:
            self._spent = dict.fromkeys(self._spent, 0.0)
            begun = time.perf_counter()
            outputs = engine.step()
            step = Step(time.perf_counter() - begun, self._spent["hidden"], self._spent["logits"])
            if len(decoding) == len(outputs) == len(prompts):
                steps.append(step)
            decoding |= {output.request_id for output in outputs}
        for number in numbers:
            engine.result(number)
        if not steps:
            raise MarsError("No step decoded every row at once: give more --max-new-tokens.")
        return steps


def whole(settings: DecodingSettings) -> DecodingSettings:
    """The settings with answers that use up their budget: no row leaves the batch before."""
    return dataclasses.replace(settings, ignore_eos=True)


class Bandwidth(Part):
    """Bytes of weights that one-token mode reads a second at batch 1, against a plain read of as much memory.

    The step's time is the median; the plain read's the best of several, each with all of torch's threads.
    """

    name = "bandwidth"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--reads", type=int, default=10, help="bandwidth: plain reads a turn (default: %(default)s)"
        )

    def measure(self, bench: Bench) -> Row:
        [prompt] = bench.prompts(1)
        clock = StepClock(
            bench.engine(1, kernels="native", max_length=len(prompt) + bench.exact.max_new_tokens)
        )
        weights = clock.engine._model.weight_bytes
        buffer = torch.ones(weights // 4)
        steps: list[float] = []
        reads: list[float] = []

        def decode() -> None:
            steps.extend(step.total for step in clock.decode([prompt], whole(bench.one)))

        in_turn(
            {
                "steps": decode,
                "reads": lambda: reads.extend(plain_reads(buffer, bench.args.reads)),
            },
            bench.args.repeats,
            warm_up=0,  # a median of many and a best of many need none
        )
        median, best = statistics.median(steps), min(reads)
        return {
            "weight_bytes": weights,
            "step_ms": 1e3 * median,
            "read_ms": 1e3 * best,
            "step_gb_per_second": weights / median / 1e9,
            "read_gb_per_second": weights / best / 1e9,
            "ratio": best / median,
            "bar": BANDWIDTH_BAR,
        }

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        return [("one-token mode at batch 1: weights read, against a plain read", [result])]

    def panels(self, result: Any) -> list[Panel]:
        def draw(axis: Any) -> None:
            speeds = [result["step_gb_per_second"], result["read_gb_per_second"]]
            bars(axis, ["one-token mode", "plain read"], speeds, "GB a second")
            line_at(axis, BANDWIDTH_BAR * result["read_gb_per_second"])
            axis.legend()

        return [draw]


def plain_reads(buffer: torch.Tensor, count: int) -> list[float]:
    """Seconds of reading the buffer once, by the two of torch's functions that do little else."""
    seconds = []
    for _ in range(count):
        for read in (torch.sum, lambda x: torch.dot(x, x)):
            begun = time.perf_counter()
            read(buffer)
            seconds.append(time.perf_counter() - begun)
    return seconds


class StepShare(Part):
    """Where a step's time goes: the model's layers, its logits, and all else."""

    name = "step"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--step-kernels", default="auto", help="step: what runs the model (native, torch)"
        )

    def measure(self, bench: Bench) -> list[Row]:
        rows = []
        for batch in bench.args.batches:
            ids = bench.prompts(batch)
            longest = max(map(len, ids)) + bench.exact.max_new_tokens
            clock = StepClock(bench.engine(batch, kernels=bench.args.step_kernels, max_length=longest))
            modes = {"one-token": whole(bench.one), "exact": whole(bench.exact)}
            steps: dict[str, list[Step]] = {name: [] for name in modes}
            in_turn(
                {
                    name: (lambda n=name, s=s: steps[n].extend(clock.decode(ids, s)))  # noqa: B023
                    for name, s in modes.items()
                },
                bench.args.repeats,
                warm_up=0,  # the steps that prefill are left out
            )
            rows += [{"batch": batch, "mode": name, **share(own, batch)} for name, own in steps.items()]
        return rows

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        return [("where a step's time goes", result)]

    def panels(self, result: Any) -> list[Panel]:
        def draw(axis: Any) -> None:
            for mode in dict.fromkeys(row["mode"] for row in result):
                own = [row for row in result if row["mode"] == mode]
                batches = [str(row["batch"]) for row in own]
                axis.plot(batches, [row["outside_percent"] for row in own], "o-", label=mode)
            bar = {str(row["batch"]): row["bar_percent"] for row in result if row["bar_percent"] is not None}
            axis.plot(list(bar), list(bar.values()), "k_", markersize=20, label="bar")
            axis.set_xlabel("batch")
            axis.set_ylabel("percent of a step outside the forward")
            axis.set_ylim(bottom=0)
            axis.legend()

        return [draw]


def share(steps: list[Step], batch: int) -> Row:
    """Medians over the steps: one that another process held up counts as one."""
    bar = STEP_BARS.get(batch)
    return {
        "steps": len(steps),
        "step_ms": 1e3 * statistics.median(step.total for step in steps),
        "layers_ms": 1e3 * statistics.median(step.layers for step in steps),
        "logits_ms": 1e3 * statistics.median(step.logits for step in steps),
        "outside_ms": 1e3 * statistics.median(step.outside for step in steps),
        "outside_percent": 100 * statistics.median(step.outside / step.total for step in steps),
        "bar_percent": None if bar is None else 100 * bar,
    }
