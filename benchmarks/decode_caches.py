"""Window cache, block-level commit and no cache in lossy mode: speed-up over one-token mode against τ.

The paper's Table 5 and Figure 5 (SPEC 5): the block-level commit feeds a block's tokens again until every row
has filled it, without a cache every forward feeds the whole texts, and the window cache does neither. Near
its end a block has no room for B - 1 masks and feeds fewer. So that each may have the number that suits it,
the window cache and the smallest block are decoded with smaller B as well; and the window cache with adaptive
width, which chooses by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from functools import partial
from typing import Any, NamedTuple

from common import decode, in_turn, ratio, totals
from decode_part import Bench, Panel, Part, Row, line_at
from mars_lm.decoding import Engine
from mars_lm.settings import DecodingSettings

WINDOW, ADAPTIVE, NONE = "window", "window, adaptive", "none"
# The window cache's speed over the best block's.
BAR = 1.1


class Cell(NamedTuple):
    """One setting that is clocked; `block_size` None: the trained B."""

    cache: str
    tau: float
    block_size: int | None = None


BASELINE = Cell(WINDOW, 1.0)  # one-token mode


def caches(args: argparse.Namespace, batch: int) -> dict[str, int | None]:
    """Each cache by name, as `Engine(commit_block=…)` takes it."""
    found: dict[str, int | None] = {WINDOW: None, ADAPTIVE: None}
    found |= {f"block {block}": block for block in args.commit_blocks}
    if args.no_cache_up_to is None or batch <= args.no_cache_up_to:
        found[NONE] = 0
    return found


def cells(taus: list[float], names: list[str], smaller: list[int]) -> list[Cell]:
    """What is clocked of the caches of these names, one-token mode first; `smaller`: further B."""
    blocks = [name for name in names if name not in (WINDOW, ADAPTIVE, NONE)]
    narrower = [WINDOW, *blocks[:1]]
    every = [
        Cell(name, tau, size)
        for name in names
        for size in (None, *(smaller if name in narrower else ()))
        for tau in taus
        if tau < 1 or (size is None and name != ADAPTIVE)  # one-token mode has no masks to choose
    ]
    return list(dict.fromkeys([BASELINE, *every]))


class Caches(Part):
    """Tokens per forward and speed-up of each cache by τ and batch, and the window over the best block."""

    name = "caches"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--taus",
            type=float,
            nargs="+",
            default=[1.0, 0.95, 0.8, 0.6],
            help="caches: thresholds of lossy mode (default: 1 0.95 0.8 0.6)",
        )
        parser.add_argument(
            "--commit-blocks",
            type=int,
            nargs="*",
            default=[4, 16, 64, 256],
            help="caches: tokens of a block, the paper's B_cache (default: 4 16 64 256); one of at least "
            "--max-new-tokens never ends",
        )
        parser.add_argument(
            "--no-cache-up-to",
            type=int,
            help="caches: the largest batch that is also decoded without a cache (default: all; at batch 32 "
            "that is minutes a turn)",
        )
        parser.add_argument(
            "--narrower",
            type=int,
            nargs="*",
            default=[2],
            help="caches: smaller B that the window cache and the first of --commit-blocks are also decoded "
            "with (default: 2)",
        )

    def measure(self, bench: Bench) -> dict[str, list[Row]]:
        speeds: list[Row] = []
        best: list[Row] = []
        for batch in bench.args.batches:  # the engines of one batch at a time: each has a cache
            rates, per_forward = self._at(batch, bench)
            for cell, rate in rates.items():
                speeds.append(
                    {
                        "batch": batch,
                        "cache": cell.cache,
                        "block_size": cell.block_size or bench.block_size,
                        "tau": cell.tau,
                        "tokens_per_second": statistics.median(rate),
                        "tokens_per_forward": per_forward[cell],
                        "speed_up": ratio(rate, rates[BASELINE]),
                    }
                )
            best += [{"batch": batch, **row} for row in window_over_best(rates, bench.block_size)]
        return {"speeds": speeds, "best": best}

    @staticmethod
    def _at(batch: int, bench: Bench) -> tuple[dict[Cell, list[float]], dict[Cell, float]]:
        """Of each cell: tokens per second turn by turn, and tokens per forward."""
        ids = bench.prompts(batch)
        longest = max(map(len, ids)) + bench.exact.max_new_tokens
        engines = {
            name: bench.engine(batch, max_length=longest, commit_block=block)
            for name, block in caches(bench.args, batch).items()
        }
        counts: dict[Cell, tuple[int, int]] = {}

        def run(cell: Cell) -> None:
            settings = dataclasses.replace(
                bench.one,
                tau=cell.tau,
                exact=False,
                block_size=cell.block_size,
                adaptive=cell.cache == ADAPTIVE,
            )
            counts[cell] = totals(decode(engines[cell.cache], ids, settings))

        for engine in engines.values():
            warm_up(engine, ids)
        smaller = [size for size in bench.args.narrower if size < bench.block_size]
        every = cells(bench.args.taus, list(engines), smaller)
        seconds = in_turn({cell: partial(run, cell) for cell in every}, bench.args.repeats, warm_up=0)
        rates = {cell: [counts[cell][0] / s for s in seconds[cell]] for cell in every}
        return rates, {cell: tokens / forwards for cell, (tokens, forwards) in counts.items()}

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        return [
            ("lossy mode by cache: speed-up is over one-token mode with the window cache", result["speeds"]),
            ("window cache over the best block", result["best"]),
        ]

    def panels(self, result: Any) -> list[Panel]:
        by_batch: dict[int, list[Row]] = {}
        for row in result["speeds"]:
            by_batch.setdefault(row["batch"], []).append(row)
        drawn: list[Panel] = [
            partial(draw_batch, batch=batch, rows=rows, what=what)
            for what in ("speed_up", "tokens_per_forward")
            for batch, rows in by_batch.items()
        ]
        drawn.append(partial(draw_names, rows=result["speeds"]))
        return [*drawn, partial(draw_best, rows=result["best"])] if result["best"] else drawn


def warm_up(engine: Engine, ids: list[list[int]]) -> None:
    """The first touch of the engine's memory: a few steps of all rows, a whole turn would be long."""
    decode(engine, ids, DecodingSettings(tau=1.0, max_new_tokens=2))


def window_over_best(rates: dict[Cell, list[float]], trained: int) -> list[Row]:
    """At each τ the block with the most tokens a second, and the window cache's ratio to it; each at the B
    that is fastest for it (`trained` is a cell's without its own)."""
    rows = []

    def fastest(of: list[Cell]) -> Cell:
        return max(of, key=lambda cell: statistics.median(rates[cell]))

    for tau in dict.fromkeys(cell.tau for cell in rates):
        at = [cell for cell in rates if cell.tau == tau and cell.cache not in (ADAPTIVE, NONE)]
        blocks = [cell for cell in at if cell.cache != WINDOW]
        if not blocks:
            continue
        best, window = fastest(blocks), fastest([cell for cell in at if cell.cache == WINDOW])
        rows.append(
            {
                "tau": tau,
                "best_block": best.cache,
                "best_block_size": best.block_size or trained,
                "best_speed_up": ratio(rates[best], rates[BASELINE]),
                "window_block_size": window.block_size or trained,
                "window_speed_up": ratio(rates[window], rates[BASELINE]),
                "window_over_best": ratio(rates[window], rates[best]),
                "bar": BAR,
            }
        )
    return rows


LABELS = {"speed_up": "speed-up over one-token mode", "tokens_per_forward": "tokens per forward"}


def lines(rows: list[Row]) -> list[tuple[str, dict[str, str], list[Row]]]:
    """A line for each cache and B: its name, its looks (the same in every panel), and its rows."""
    widest = max(row["block_size"] for row in rows)
    every = list(dict.fromkeys((row["cache"], row["block_size"]) for row in rows))
    colours = {cache: f"C{number}" for number, cache in enumerate(dict.fromkeys(c for c, _ in every))}
    return [
        (
            ("no cache" if cache == NONE else cache) + (f", B = {size}" if size < widest else ""),
            {"color": colours[cache], "linestyle": "--" if size < widest else "-", "marker": "o"},
            [row for row in rows if (row["cache"], row["block_size"]) == (cache, size)],
        )
        for cache, size in every
    ]


def draw_batch(axis: Any, batch: int, rows: list[Row], what: str) -> None:
    """One of `LABELS` against τ, a line for each cache."""
    axis.axhline(1.0, color="grey", linewidth=0.8)
    for _, looks, own in lines(rows):
        points = sorted((row["tau"], row[what]) for row in own)
        axis.plot(*zip(*points, strict=True), **looks)
    axis.set_title(f"batch {batch}")
    axis.set_xlabel("τ")
    axis.set_ylabel(LABELS[what])


def draw_names(axis: Any, rows: list[Row]) -> None:
    """What each line is, where it hides none."""
    axis.set_axis_off()
    for name, looks, _ in lines(rows):
        axis.plot([], [], label=name, **looks)
    axis.legend(loc="center")


def draw_best(axis: Any, rows: list[Row]) -> None:
    """The window cache over the best block against the batch, a line for each τ."""
    line_at(axis, BAR)
    for tau in dict.fromkeys(row["tau"] for row in rows):
        own = [row for row in rows if row["tau"] == tau]
        axis.plot(
            [str(row["batch"]) for row in own],
            [row["window_over_best"] for row in own],
            "o-",
            label=f"τ = {tau:g}",
        )
    axis.set_xlabel("batch")
    axis.set_ylabel("window cache over the best block")
    axis.legend(fontsize=7)
