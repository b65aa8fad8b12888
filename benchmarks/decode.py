"""Decoding: tokens per forward, texts equal to AR's, and speed.

    python benchmarks/decode.py --data ../shared/data --dtype float32 --output docs/results/decode-float32

Prints tables and writes OUTPUT.json and OUTPUT.png. --parts picks from: forwards (tokens per forward on
maths, code and chat prompts), equal (exact mode's texts against transformers' greedy ones), clock (exact
against one-token mode), transformers (one-token mode against transformers' generate). Ratios are measured
side by side in one run: each turn runs every contestant once.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from common import in_turn, load_prompts, prompt_ids, ratio, write
from mars_lm import checkpoint as checkpoints
from mars_lm.decoding import Engine, generate
from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings

BARS = {"gsm8k": 2.0, "humaneval": 1.6, "ifeval": 1.4}


def forwards(args: Any, loaded: checkpoints.Checkpoint, exact: DecodingSettings) -> list[dict[str, Any]]:
    """Tokens per forward of exact mode by kind of prompt: all masks, no recovery masks, those that pay."""
    rows = []
    for task in BARS:
        ids = prompt_ids(loaded, load_prompts(args.data, task, args.prompts, args.seed))
        row: dict[str, Any] = {"task": task, "prompts": len(ids), "bar": BARS[task]}
        for name, settings in kinds(exact).items():
            results = generate(loaded, ids, settings, max_rows=args.rows)
            tokens, passes = sum(len(r.token_ids) for r in results), sum(r.forwards for r in results)
            row[name] = tokens / passes
            row["tokens"] = tokens
        rows.append(row)
    return rows


def kinds(exact: DecodingSettings) -> dict[str, DecodingSettings]:
    """Exact mode with all its masks, with one mask group a forward, and with as many masks as pay."""
    return {
        "exact": dataclasses.replace(exact, adaptive=False),
        "exact, no recovery": dataclasses.replace(exact, adaptive=False, recovery=False),
        "exact, adaptive": exact,
    }


def equal(args: Any, loaded: checkpoints.Checkpoint, exact: DecodingSettings) -> dict[str, Any]:
    """How many of exact mode's texts are transformers' greedy ones, token for token."""
    ids = prompt_ids(loaded, load_prompts(args.data, "gsm8k", args.equal_prompts, args.seed))
    ours = generate(loaded, ids, exact, max_rows=args.rows)
    same, parted = 0, []
    for number, (prompt, result) in enumerate(zip(ids, ours, strict=True)):
        theirs = reference(loaded, [prompt], args.max_new_tokens)[0]
        if theirs == result.token_ids:
            same += 1
        else:
            parted.append(number)
    return {"prompts": len(ids), "equal": same, "parted": parted}


def reference(loaded: checkpoints.Checkpoint, ids: list[list[int]], budget: int) -> list[list[int]]:
    """transformers' greedy tokens, left-padded batches as its users write them."""
    width = max(map(len, ids))
    pad = loaded.tokenizer.pad_token_id or 0
    batch = torch.tensor([[pad] * (width - len(row)) + list(row) for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    ends = sorted(checkpoints.end_token_ids(loaded))
    with torch.inference_mode():
        out = loaded.model.generate(
            batch,
            attention_mask=mask,
            max_new_tokens=budget,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=pad,
        )
    texts = []
    for row in out[:, width:].tolist():
        cut = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:cut])
    return texts


def clock(args: Any, loaded: checkpoints.Checkpoint, exact: DecodingSettings) -> list[dict[str, Any]]:
    """Seconds of exact mode against one-token mode, batch by batch size."""
    one = DecodingSettings(tau=1.0, max_new_tokens=exact.max_new_tokens)
    rows = []
    for batch in args.batches:
        ids = prompt_ids(loaded, load_prompts(args.data, "gsm8k", batch, args.seed))
        engine = Engine(loaded, max_rows=batch, share_prefixes=False)  # turns repeat prompts
        counts: dict[str, tuple[int, int]] = {}

        def run(name: str, settings: DecodingSettings) -> None:
            numbers = [engine.add(prompt, settings) for prompt in ids]  # noqa: B023
            for _ in engine.stream():  # noqa: B023
                pass
            results = [engine.result(number) for number in numbers]  # noqa: B023
            counts[name] = (sum(len(r.token_ids) for r in results), sum(r.forwards for r in results))  # noqa: B023

        every = {"one": one, **kinds(exact)}
        seconds = in_turn({name: (lambda n=name, s=s: run(n, s)) for name, s in every.items()}, args.repeats)
        row: dict[str, Any] = {
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
        rows.append(row)
    return rows


def against_transformers(args: Any, loaded: checkpoints.Checkpoint) -> list[dict[str, Any]]:
    """Tokens per second of one-token mode against transformers' generate."""
    rows = []
    for batch in args.batches:
        ids = prompt_ids(loaded, load_prompts(args.data, "gsm8k", batch, args.seed))
        budget = args.max_new_tokens
        settings = DecodingSettings(tau=1.0, max_new_tokens=budget)
        engine = Engine(loaded, max_rows=batch, share_prefixes=False)  # turns repeat prompts
        tokens: dict[str, int] = {}

        def ours() -> None:
            numbers = [engine.add(prompt, settings) for prompt in ids]  # noqa: B023
            for _ in engine.stream():  # noqa: B023
                pass
            tokens["ours"] = sum(len(engine.result(n).token_ids) for n in numbers)  # noqa: B023

        def theirs() -> None:
            tokens["theirs"] = sum(map(len, reference(loaded, ids, budget)))  # noqa: B023

        seconds = in_turn({"ours": ours, "theirs": theirs}, args.repeats)
        rates = {name: [tokens[name] / s for s in values] for name, values in seconds.items()}
        rows.append(
            {
                "batch": batch,
                "ours": statistics.median(rates["ours"]),
                "transformers": statistics.median(rates["theirs"]),
                "ratio": ratio(rates["ours"], rates["theirs"]),
            }
        )
    return rows


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """A list of flat (or once nested) rows as a printed table."""
    flat = [
        {
            f"{k} {kk}" if isinstance(v, dict) else k: vv
            for k, v in row.items()
            for kk, vv in (v.items() if isinstance(v, dict) else [("", v)])
        }
        for row in rows
    ]
    out = Table(title=title, title_justify="left")
    for name in flat[0]:
        out.add_column(name.replace("_", " "), justify="right")
    for row in flat:
        out.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    return out


def picture(path: Path, result: dict[str, Any]) -> None:
    """Tokens per forward by task, and speed-up by batch; a panel for each part that was run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [name for name in ("forwards", "clock", "transformers") if name in result]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for panel, axis in zip(panels, axes[0], strict=True):
        rows = result[panel]
        if panel == "forwards":
            at = range(len(rows))
            for number, name in enumerate(name for name in rows[0] if name.startswith("exact")):
                place = [i + 0.27 * (number - 1) for i in at]
                axis.bar(place, [row[name] for row in rows], 0.27, label=name)
            axis.hlines(
                [row["bar"] for row in rows], [i - 0.4 for i in at], [i + 0.4 for i in at], "k", label="bar"
            )
            axis.set_xticks(at, [row["task"] for row in rows])
            axis.set_ylabel("tokens per forward")
            axis.legend(loc="lower right")
            continue
        batches = [str(row["batch"]) for row in rows]
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xlabel("batch")
        if panel == "clock":
            for name in (name for name in rows[0] if name.startswith("exact")):
                axis.plot(batches, [row[name]["speed_up"] for row in rows], "o-", label=name)
            axis.set_ylabel("speed-up over one-token mode")
            axis.legend()
        else:
            axis.plot(batches, [row["ratio"] for row in rows], "o-")
            axis.set_ylabel("one-token mode over transformers' generate")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", help="default: the packaged model")
    parser.add_argument("--adapter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, required=True, help="path without its ending")
    parser.add_argument("--parts", nargs="+", default=["forwards", "equal", "clock", "transformers"])
    parser.add_argument("--prompts", type=int, default=32, help="prompts a task for tokens per forward")
    parser.add_argument("--equal-prompts", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tau", type=float)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    try:
        if args.model:
            loaded = checkpoints.load(args.model, adapter=args.adapter, dtype=args.dtype, device="cpu")
        else:
            loaded = checkpoints.load_default(dtype=args.dtype, device="cpu")
        changes = {} if args.tau is None else {"tau": args.tau}
        exact = DecodingSettings(max_new_tokens=args.max_new_tokens, **changes)
        result: dict[str, Any] = {"dtype": str(loaded.model.dtype), "settings": dataclasses.asdict(exact)}
        console = Console(width=150)
        if "forwards" in args.parts:
            result["forwards"] = forwards(args, loaded, exact)
            console.print(table("exact mode: tokens per forward", result["forwards"]))
        if "equal" in args.parts:
            result["equal"] = equal(args, loaded, exact)
            console.print(table("exact mode: texts equal to transformers' greedy ones", [result["equal"]]))
        if "clock" in args.parts:
            result["clock"] = clock(args, loaded, exact)
            console.print(table("exact against one-token mode", result["clock"]))
        if "transformers" in args.parts:
            result["transformers"] = against_transformers(args, loaded)
            console.print(
                table(
                    "one-token mode against transformers' generate, tokens per second", result["transformers"]
                )
            )
    except MarsError as error:
        sys.exit(str(error))
    write(args.output.with_suffix(".json"), result, seed=args.seed)
    picture(args.output.with_suffix(".png"), result)


if __name__ == "__main__":
    main()
