"""What the parts of the decoding benchmark share: what they measure with, and what a part is."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from common import load_prompts, prompt_ids
from mars_lm.checkpoint import Checkpoint
from mars_lm.decoding import Engine
from mars_lm.decoding.forward import ModelForward
from mars_lm.settings import DecodingSettings

Row = dict[str, Any]
# Draws into a matplotlib axis.
Panel = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Bench:
    """The model under test, the options, and exact mode as they ask for it."""

    args: argparse.Namespace
    loaded: Checkpoint
    exact: DecodingSettings

    @property
    def one(self) -> DecodingSettings:
        """One-token mode with the same budget."""
        return DecodingSettings(tau=1.0, max_new_tokens=self.exact.max_new_tokens)

    @property
    def block_size(self) -> int:
        """The trained B."""
        return self.loaded.mars.block_size if self.loaded.mars else 1

    @property
    def kernels(self) -> str:
        """What runs the model where a part does not choose: "native", or "torch" where those can't."""
        return "torch" if isinstance(self.engine(1, max_length=32)._model, ModelForward) else "native"

    def prompts(self, count: int, task: str = "gsm8k") -> list[list[int]]:
        """Token ids of `count` prompts in the chat template: the same ones for the same count."""
        return prompt_ids(self.loaded, load_prompts(self.args.data, task, count, self.args.seed))

    def engine(self, rows: int, **options: Any) -> Engine:
        """An engine that prefills every prompt anew: turns repeat them."""
        return Engine(self.loaded, max_rows=rows, share_prefixes=False, **options)


class Part:
    """One --parts of the benchmark.

    Attributes:
        name: as --parts and the JSON have it.
    """

    name: str

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """The options that no other part reads."""

    def measure(self, bench: Bench) -> Any:
        """The part's entry in the JSON."""
        raise NotImplementedError

    def tables(self, result: Any) -> list[tuple[str, list[Row]]]:
        """Titles and rows of the printed tables."""
        raise NotImplementedError

    def panels(self, result: Any) -> list[Panel]:
        """The part's panels in the picture."""
        return []


def flat(rows: list[Row]) -> list[Row]:
    """Rows whose values may be objects, as `common.table` prints them: a column for each inner value."""
    return [
        {
            (f"{k} {kk}" if isinstance(v, dict) else k).replace("_", " "): vv
            for k, v in row.items()
            for kk, vv in (v.items() if isinstance(v, dict) else [("", v)])
        }
        for row in rows
    ]


def bars(axis: Any, names: list[str], values: list[float], label: str) -> None:
    """A bar for each name, with its value above."""
    axis.bar_label(axis.bar(names, values, 0.5), fmt="%.3g")
    axis.set_ylabel(label)


def line_at(axis: Any, bar: float) -> None:
    """A bar to be reached (or stayed below) as a dashed line."""
    axis.axhline(bar, color="k", linewidth=0.8, linestyle="--", label=f"bar {bar:g}")
