"""What a forward costs by its number of tokens: transformers' modules against the CPU kernels.

    python benchmarks/forward.py --output docs/results/forward

One row with 300 tokens behind it; the layers alone, without the output matrix. Prints a table and writes
OUTPUT.json and OUTPUT.png. Contestants run in turn; a figure is the median over turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from common import in_turn, write
from mars_lm import checkpoint as checkpoints
from mars_lm.decoding.executors import make_forward
from mars_lm.decoding.forward import Feed, Forward
from mars_lm.errors import MarsError


def feed(behind: int, tokens: int) -> Feed:
    """`tokens` tokens of one row behind `behind` others."""
    place = np.arange(behind, behind + tokens)
    return Feed(np.zeros(1, np.int64), np.array([tokens]), place * 7 % 4096, place, place, place + 1, place)


@torch.inference_mode()
def measure(
    forwards: dict[str, Forward], behind: int, sizes: list[int], repeats: int
) -> list[dict[str, Any]]:
    """Milliseconds of each forward at each size."""
    for forward in forwards.values():
        forward.hidden(Feed.of_one_row(np.arange(behind)))
    rows = []
    for size in sizes:
        now = feed(behind, size)
        seconds = in_turn({n: (lambda f=f: f.hidden(now)) for n, f in forwards.items()}, repeats, warm_up=2)  # noqa: B023
        rows.append({"tokens": size, **{n: 1e3 * statistics.median(s) for n, s in seconds.items()}})
    return rows


def picture(path: Path, rows: list[dict[str, Any]]) -> None:
    """Milliseconds against tokens, a line for each contestant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for name in list(rows[0])[1:]:
        axis.plot([row["tokens"] for row in rows], [row[name] for row in rows], "o-", label=name)
    axis.set_xlabel("tokens a forward")
    axis.set_ylabel("milliseconds")
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="path without its ending")
    parser.add_argument("--behind", type=int, default=300)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    forwards = {}
    try:
        for dtype in ("float32", "bfloat16"):
            model = checkpoints.load_default(dtype=dtype, device="cpu").model
            for kernels in ("torch", "native"):
                slots = args.behind + max(args.sizes)
                forwards[f"{kernels}, {dtype}"] = make_forward(model, 1, slots, kernels)
    except MarsError as error:
        sys.exit(str(error))
    rows = measure(forwards, args.behind, args.sizes, args.repeats)
    table = Table(title="milliseconds of a forward", title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=120).print(table)
    write(args.output.with_suffix(".json"), {"behind": args.behind, "milliseconds": rows})
    picture(args.output.with_suffix(".png"), rows)


if __name__ == "__main__":
    main()
