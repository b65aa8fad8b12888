"""Decoding: tokens per forward, texts equal to AR's, and speed.

    python benchmarks/decode.py --data ../shared/data --dtype float32 --output docs/results/decode-float32

Prints tables and writes OUTPUT.json and OUTPUT.png. Ratios are measured side by side in one run: each turn
runs every contestant once. --parts picks from:

    forwards      tokens per forward on maths, code and chat prompts
    equal         exact mode's texts against transformers' greedy ones
    clock         exact against one-token mode, by batch
    transformers  one-token mode against transformers' generate, by batch
    caches        lossy mode with the window cache, block-level commit and no cache, by tau and batch
    llamacpp      exact mode at batch 1 against llama.cpp (wants --llama-python)
    divergence    exact mode's texts that part from one-token mode's, and how near a tie AR was there
    bandwidth     weights read a second in one-token mode at batch 1, against a plain read
    step          time of a step outside the model's forward, by batch

The first four are run where none is named. benchmarks/vllm.py compares with vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console

from common import table, write
from decode_caches import Caches
from decode_exact import Clock, Forwards
from decode_part import Bench, Panel, Part, flat
from decode_peers import LlamaCpp, Transformers
from decode_steps import Bandwidth, StepShare
from decode_texts import Divergence, Equal
from mars_lm import checkpoint as checkpoints
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Forwards(),
        Equal(),
        Clock(),
        Transformers(),
        Caches(),
        LlamaCpp(),
        Divergence(),
        Bandwidth(),
        StepShare(),
    )
}
DEFAULT_PARTS = ["forwards", "equal", "clock", "transformers"]
COLUMNS = 4  # of panels in the picture


def picture(path: Path, panels: list[Panel]) -> None:
    """All panels of the parts that were run, none where no part has one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not panels:
        return
    columns = min(len(panels), COLUMNS)
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 4 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for draw, axis in zip(panels, axes.flat, strict=False):
        draw(axis)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def options() -> argparse.ArgumentParser:
    """The benchmark's own options and those of its parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", help="default: the packaged model")
    parser.add_argument("--adapter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, required=True, help="path without its ending")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), metavar="PART", default=DEFAULT_PARTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16], help="clocks: rows at once")
    parser.add_argument("--repeats", type=int, default=3, help="clocks: turns")
    parser.add_argument(
        "--clock-prompts", type=int, default=8, help="clock, transformers: prompts a turn, if not the batch's"
    )
    parser.add_argument("--rows", type=int, default=8, help="texts: rows at once")
    parser.add_argument("--tau", type=float, help="of exact mode")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    for part in PARTS.values():
        part.add_options(parser)
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = options().parse_args(arguments)
    transformers.logging.set_verbosity_error()
    console = Console(width=150)
    panels: list[Panel] = []
    try:
        if args.model:
            loaded = checkpoints.load(args.model, adapter=args.adapter, dtype=args.dtype, device="cpu")
        else:
            loaded = checkpoints.load_default(dtype=args.dtype, device="cpu")
        changes = {} if args.tau is None else {"tau": args.tau}
        exact = DecodingSettings(max_new_tokens=args.max_new_tokens, **changes)
        bench = Bench(args, loaded, exact)
        result: dict[str, Any] = {
            "dtype": loaded.dtype,
            "kernels": bench.kernels,
            "settings": dataclasses.asdict(exact),
        }
        console.print(f"{result['dtype']}, {result['kernels']} kernels")
        for name, part in PARTS.items():
            if name not in args.parts:
                continue
            result[name] = part.measure(bench)
            panels += part.panels(result[name])
            for title, rows in part.tables(result[name]):
                console.print(title, table(flat(rows)), sep="\n")  # as a table's own title it would be folded
    except MarsError as error:
        sys.exit(str(error))
    write(args.output.with_suffix(".json"), result, seed=args.seed)
    picture(args.output.with_suffix(".png"), panels)


if __name__ == "__main__":
    main()
