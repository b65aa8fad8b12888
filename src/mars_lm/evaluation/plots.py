"""The pictures: accuracy against tokens per forward and against speed-up, the rules compared, the gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _mean_interval(row: dict[str, Any]) -> tuple[float, float]:
    """Half widths below and above a row's mean score, in percent; benchmarks are independent."""
    below = above = 0.0
    scores = list(row["scores"].values())
    for score in scores:
        if score["low"] is not None:
            below += (score["value"] - score["low"]) ** 2
            above += (score["high"] - score["value"]) ** 2
    return 100 * below**0.5 / len(scores), 100 * above**0.5 / len(scores)


def plot_frontier(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """accuracy-tokens-per-forward.png and accuracy-speed-up.png: one line a checkpoint and mode.

    A colour is a checkpoint, a dash and a marker are a mode. Of several rules the first is drawn: rules.png
    compares them.
    """
    plt = _pyplot()
    written = []
    rules = [row["rule"] for row in rows if row["rule"] is not None]
    kept = "probability" if "probability" in rules else next(iter(rules), None)
    rows = [row for row in rows if row["rule"] in (None, kept)]
    for key, label, name in (
        ("tokens_per_forward", "tokens per forward", "accuracy-tokens-per-forward.png"),
        ("speed_up", "measured speed-up over one token per forward", "accuracy-speed-up.png"),
    ):
        figure, axis = plt.subplots(figsize=(7, 4.5))
        lines = _lines(rows, ("label", "mode", "rule", "masks", "block_size"))
        for (line, points), style in zip(lines.items(), _styles(lines), strict=True):
            points = [row for row in points if row["mean"] is not None and row[key] is not None]
            if not points:
                continue
            points.sort(key=lambda row: row[key])
            *names, masks, size = line
            title = ", ".join(str(p) for p in (*names, masks and f"{masks} masks", size and f"B={size}") if p)
            errors = list(zip(*(_mean_interval(row) for row in points), strict=True))
            axis.errorbar(
                [row[key] for row in points],
                [100 * row["mean"] for row in points],
                yerr=errors,
                capsize=2,
                label=title,
                **style,
            )
        written.append(_finish(plt, figure, axis, label, "mean score, %", folder / name))
    return written


def plot_rules(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """rules.png: lossy accuracy against tokens per forward, one line a rule (where there are two)."""
    lossy = [
        row
        for row in rows
        if row["mode"] == "lossy" and row["mean"] is not None and row["tokens_per_forward"]
    ]
    lines = _lines(lossy, ("label", "rule", "masks", "block_size"))
    if len({rule for _, rule, _, _ in lines}) < 2:
        return []
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for ((checkpoint, rule, masks, size), points), style in zip(lines.items(), _styles(lines), strict=True):
        points.sort(key=lambda row: row["tokens_per_forward"])
        axis.plot(
            [row["tokens_per_forward"] for row in points],
            [100 * row["mean"] for row in points],
            **style,
            label=f"{checkpoint}, {rule}, {masks} masks" + (f", B={size}" if size else ""),
        )
    return [_finish(plt, figure, axis, "tokens per forward", "mean score, %", folder / "rules.png")]


def plot_gaps(results: dict[str, dict[str, Any]], shares: Sequence[dict[str, Any]], path: Path) -> Path:
    """What each view costs each model, its nats by distance, and the AR share against B."""
    plt = _pyplot()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8))
    names = list(results)
    views = list(results[names[0]]["views"])
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        left.barh(
            [i + number * height for i in range(len(views))],
            [results[name]["views"][view]["cost"] for view in views],
            height,
            label=name,
        )
    left.set_yticks([i + 0.4 - height / 2 for i in range(len(views))], views, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("nats per token above AR")
    left.legend(fontsize=8)
    for number, name in enumerate(names):
        for view, style in (
            ("masking", "o-"),
            ("masking + attention + alignment", "s--"),
            ("all, one by one", "^:"),
        ):
            values = results[name]["views"].get(view, {}).get("nats_by_distance")
            if values:
                shown = [(d, value) for d, value in enumerate(values, start=1) if value is not None]
                middle.plot(
                    *zip(*shown, strict=True),
                    style,
                    color=f"C{number}",
                    markersize=4,
                    label=f"{name}, {view}",
                )
        middle.axhline(results[name]["ar"]["nats"], color=f"C{number}", linewidth=0.6)
    middle.set_xticks(range(1, results[names[0]].get("block_size", 1) + 1))
    middle.set_xlabel("distance in the block")
    middle.set_ylabel("nats per token")
    middle.legend(fontsize=6)
    sizes = [line["block_size"] for line in shares]
    for key, style, label in (
        ("with_sft_window", "o-", "with the SFT loss"),
        ("with_sft_paper", "s-", "with it, paper layout"),
        ("without_sft_paper", "^-", "without it, paper layout"),
    ):
        right.plot(sizes, [line[key] for line in shares], style, markersize=4, label=label)
    right.axhline(0.5, color="grey", linewidth=0.6)
    right.set_ylim(0, 1)
    right.set_xscale("log", base=2)
    right.set_xticks(sizes, [str(size) for size in sizes])
    right.set_xlabel("B")
    right.set_ylabel("AR share of the loss")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _lines(
    rows: Sequence[dict[str, Any]], keys: Sequence[str]
) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by some of their fields; the one-token row of a checkpoint begins each of its lines."""
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    first = {row["label"]: row for row in rows if row["mode"] == "one-token"}
    for row in rows:
        if row["mode"] != "one-token":
            lines.setdefault(tuple(row[key] for key in keys), []).append(row)
    for (checkpoint, *_), points in lines.items():
        if checkpoint in first:
            points.insert(0, first[checkpoint])
    for checkpoint, row in first.items():
        if not any(key[0] == checkpoint for key in lines):
            lines[tuple(row[key] for key in keys)] = [row]
    return lines


def _styles(lines: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """For each line a colour by its checkpoint, and a dash and a marker by all else."""
    every = list(lines)
    checkpoints = list(dict.fromkeys(line[0] for line in every))
    others = list(dict.fromkeys(line[1:] for line in every))
    dashes, markers = ("-", "--", ":", "-."), "os^Dv*XP"
    return [
        {
            "color": f"C{checkpoints.index(line[0])}",
            "linestyle": dashes[others.index(line[1:]) % len(dashes)],
            "marker": markers[others.index(line[1:]) % len(markers)],
            "markersize": 4,
            "linewidth": 1,
        }
        for line in every
    ]


def _finish(plt: Any, figure: Any, axis: Any, x: str, y: str, path: Path) -> Path:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
