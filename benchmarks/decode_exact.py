"""Exact mode: tokens per forward by kind of prompt, and speed against one-token mode."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from common import decode, in_turn, ratio, totals
from decode_part import Bench, Panel, Part, Row
from mars_lm.decoding import generate
from mars_lm.settings import DecodingSettings

BARS = {"gsm8k": 2.0, "humaneval": 1.6, "ifeval": 1.4}


def kinds(exact: DecodingSettings) -> dict[str, DecodingSettings]:
    """Exact mode with all its masks, with one mask group a forward, and with as many masks as pay."""
    return {
        "exact": dataclasses.replace(exact, adaptive=False),
        "exact, no recovery": dataclasses.replace(exact, adaptive=False, recovery=False),
        "exact, adaptive": exact,
    }


class Forwards(Part):
    """Tokens per forward of exact mode by kind of prompt: all masks, no recovery masks, those that pay."""

    name = "forwards"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--prompts", type=int, default=32, help="forwards: prompts a task (default: %(default)s)"
        )

    def measure(self, bench: Bench) -> list[Row]:
        rows = []
        for task in BARS:
            ids = bench.prompts(bench.args.prompts, task)
            row: Row = {"task": task, "prompts": len(ids), "bar": BARS[task]}
            for name, settings in kinds(bench.exact).items():
                results = generate(bench.loaded, ids, settings, max_rows=bench.args.rows)
                tokens, passes = totals(results)
                row[name] = tokens / passes
                row["tokens"] = tokens
            rows.append(row)
        return rows

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        return [("exact mode: tokens per forward", result)]

    def panels(self, result: Any) -> list[Panel]:
        def draw(axis: Any) -> None:
            at = range(len(result))
            for number, name in enumerate(name for name in result[0] if name.startswith("exact")):
                place = [i + 0.27 * (number - 1) for i in at]
                axis.bar(place, [row[name] for row in result], 0.27, label=name)
            axis.hlines(
                [row["bar"] for row in result], [i - 0.4 for i in at], [i + 0.4 for i in at], "k", label="bar"
            )
            axis.set_xticks(at, [row["task"] for row in result])
            axis.set_ylabel("tokens per forward")
            axis.legend(loc="lower right")

        return [draw]


class Clock(Part):
    """Seconds of exact mode against one-token mode, batch by batch size."""

    name = "clock"

    def measure(self, bench: Bench) -> list[Row]:
        return [self._at(batch, bench) for batch in bench.args.batches]

    @staticmethod
    def _at(batch: int, bench: Bench) -> Row:
        ids, engine = bench.prompts(max(batch, bench.args.clock_prompts)), bench.engine(batch)
        counts: dict[str, tuple[int, int]] = {}

        def run(name: str, settings: DecodingSettings) -> None:
            counts[name] = totals(decode(engine, ids, settings))

        every = {"one": bench.one, **kinds(bench.exact)}
        seconds = in_turn(
            {name: (lambda n=name, s=s: run(n, s)) for name, s in every.items()}, bench.args.repeats
        )
        row: Row = {
            "batch": batch,
            "one_tokens_per_second": counts["one"][0] / statistics.median(seconds["one"]),
        }
        for name in list(every)[1:]:
            per_forward = counts[name][0] / counts[name][1]
            speed_up = ratio(
                [s / counts["one"][0] for s in seconds["one"]], [s / counts[name][0] for s in seconds[name]]
            )
            row[name] = {
                "tokens_per_forward": per_forward,
                "speed_up": speed_up,
                "share": speed_up / per_forward,
            }
        return row

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        return [("exact against one-token mode", result)]

    def panels(self, result: Any) -> list[Panel]:
        def draw(axis: Any) -> None:
            axis.axhline(1.0, color="grey", linewidth=0.8)
            axis.set_xlabel("batch")
            batches = [str(row["batch"]) for row in result]
            for name in (name for name in result[0] if name.startswith("exact")):
                axis.plot(batches, [row[name]["speed_up"] for row in result], "o-", label=name)
            axis.set_ylabel("speed-up over one-token mode")
            axis.legend()

        return [draw]
