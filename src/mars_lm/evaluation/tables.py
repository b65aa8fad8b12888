"""Results as Markdown, which reads in a terminal as in the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mars_lm.evaluation.statistics import Interval


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up; all but the first are set flush right."""
    widths = [max(2, *(len(line[i]) for line in [header, *rows])) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (cell.replace("|", "\\|") for cell in cells)
        padded = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]) + " |"
    return "\n".join([line(header), rule, *map(line, rows)])


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def share(score: dict[str, Any]) -> str:
    """A score in percent with its interval; a metric that is no share as it stands."""
    if score["value"] is None:
        return "–"
    if score["low"] is None:
        return f"{score['value']:.4g}"
    return Interval(score["value"], score["low"], score["high"]).percent()


def evaluation_table(parts: dict[str, Any]) -> str:
    """One line a benchmark: score with its 95% interval, rows, tokens per forward and per second."""
    rows = []
    for name, part in parts.items():
        speed = part["speed"]
        rows.append(
            [
                part.get("title", name),
                part["score"]["metric"],
                share(part["score"]),
                str(part["score"]["rows"]),
                number(speed.get("tokens_per_forward")),
                number(speed.get("tokens_per_second"), 1),
            ]
        )
    values = [part["score"] for part in parts.values()]
    if len(values) > 1 and all(score["value"] is not None and score["low"] is not None for score in values):
        mean = sum(score["value"] for score in values) / len(values)
        rows.append(["mean", "", f"{100 * mean:.1f}", "", *_overall(parts)])
    return markdown(["task", "metric", "score, % [95% CI]", "rows", "tokens/forward", "tokens/s"], rows)


def _overall(parts: dict[str, Any]) -> list[str]:
    speeds = [part["speed"] for part in parts.values() if part["speed"]]
    tokens = sum(speed["tokens"] for speed in speeds)
    forwards = sum(speed["forwards"] for speed in speeds)
    seconds = sum(speed["seconds"] for speed in speeds)
    return [
        number(tokens / forwards if forwards else None),
        number(tokens / seconds if seconds else None, 1),
    ]


def sweep_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a cell."""
    tasks = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    titles = {name: title for row in rows for name, title in row["titles"].items()}
    header = ["checkpoint", "mode", "rule", "tau", "B", "masks", *(titles[name] for name in tasks)]
    header += ["mean", "tokens/forward", "tokens/s", "speed-up"]
    lines = []
    for row in rows:
        lines.append(
            [
                row["label"],
                row["mode"],
                row["rule"] or "–",
                "–" if row["tau"] is None else f"{row['tau']:g}",
                "–" if row["block_size"] is None else str(row["block_size"]),
                row["masks"] or "–",
                *(share(row["scores"][name]) if name in row["scores"] else "–" for name in tasks),
                "–" if row["mean"] is None else f"{100 * row['mean']:.1f}",
                number(row["tokens_per_forward"]),
                number(row["tokens_per_second"], 1),
                number(row["speed_up"]),
            ]
        )
    return markdown(header, lines)


def gaps_table(results: dict[str, dict[str, Any]]) -> str:
    """The gap table: a line a view; nats, cost and agreement of each model, then the last by distance.

    Args:
        results: by the model's name, what `measure_gaps` returns.
    """
    names = list(results)
    first = results[names[0]]
    size = first["block_size"]
    header = ["gaps open", "read"]
    for name in names:
        header += [f"{name}: nats", "cost", "agreement"]
    header += [f"{names[-1]}, d={d}" for d in range(1, size + 1)]
    rows = [
        [
            "none (AR)",
            "",
            *(cell for name in names for cell in (number(results[name]["ar"]["nats"], 3), "0", "1")),
        ]
        + ["–"] * size
    ]
    for view, about in first["views"].items():
        line = [view, about["reading"]]
        for name in names:
            kept = results[name]["views"][view]
            line += [number(kept["nats"], 3), f"{kept['cost']:+.3f}", number(kept["agreement"], 3)]
        line += [number(value, 3) for value in results[names[-1]]["views"][view]["nats_by_distance"]]
        rows.append(line)
    return markdown(header, rows)


def ar_share_table(lines: Sequence[dict[str, Any]]) -> str:
    """The AR share against B, measured and in closed form."""
    header = ["B", "with SFT loss", "B/(2B-1)", "with SFT loss, paper layout", "without, paper layout", "1/B"]
    rows = [
        [
            str(line["block_size"]),
            number(line["with_sft_window"], 3),
            number(line["closed_form_with"], 3),
            number(line["with_sft_paper"], 3),
            number(line["without_sft_paper"], 3),
            number(line["closed_form_without"], 3),
        ]
        for line in lines
    ]
    return markdown(header, rows)


def calibration_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a tau: agreement with AR (lossy) or speed against drafting all (exact), with its interval."""
    measured = "agreement with AR, %" if rows and "agreement" in rows[0] else "speed against tau 0"
    lines = []
    for row in rows:
        if "agreement" in row:
            value = Interval(**row["agreement"]).percent()
        else:
            kept = Interval(**row["speed"])
            value = f"{kept.value:.3f} [{kept.low:.3f}, {kept.high:.3f}]"
        lines.append(
            [
                f"{row['tau']:g}",
                value,
                number(row["tokens_per_forward"]),
                number(row["tokens_per_second"], 1),
                "chosen" if row.get("chosen") else "",
            ]
        )
    return markdown(["tau", f"{measured} [95% CI]", "tokens/forward", "tokens/s", ""], lines)
