"""`mars sweep`: tau x B x rule x exact or not, on some tasks; one folder of results a cell, resumable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mars_lm.checkpoint import Checkpoint
from mars_lm.errors import MarsError
from mars_lm.evaluation.decoders import DECODERS, Decode, check_decoder, make_decoder, settings_for
from mars_lm.evaluation.plots import plot_frontier, plot_rules
from mars_lm.evaluation.results import fingerprint, holds_results, read_json, write_json
from mars_lm.evaluation.run import EvaluationOptions, Say, evaluate, mean_score
from mars_lm.evaluation.tables import sweep_table
from mars_lm.provenance import provenance
from mars_lm.settings import DecodingSettings

# What each rule's tau is swept over where nothing is named; 1 is one-token mode, and always there.
TAUS: dict[str, tuple[float, ...]] = {
    "probability": (0.99, 0.95, 0.9, 0.8, 0.6),
    "margin": (0.98, 0.9, 0.8, 0.6, 0.4),
    "entropy": (0.05, 0.2, 0.4, 0.8, 1.6),
}
ONE_TOKEN = "one-token"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way of decoding.

    Args:
        mode: one-token, exact, lossy, or a baseline decoder's name.
        rule, tau: None where the mode has none.
        block_size: None is the trained B.
        adaptive: of exact and lossy mode; None is the mode's own default.
    """

    mode: str
    rule: str | None = None
    tau: float | None = None
    block_size: int | None = None
    adaptive: bool | None = None

    @property
    def name(self) -> str:
        """Such as `lossy-probability-0.95-B4`: the cell's folder."""
        parts = [self.mode]
        if self.rule is not None:
            parts += [self.rule, f"{self.tau:g}"]
        if self.block_size is not None:
            parts.append(f"B{self.block_size}")
        if self.adaptive is not None:
            parts.append("adaptive" if self.adaptive else "all-masks")
        return "-".join(parts)

    @property
    def decoder(self) -> str:
        return "mars" if self.mode in (ONE_TOKEN, "exact", "lossy") else self.mode

    def settings(self, checkpoint: Checkpoint) -> DecodingSettings:
        """As the decoder takes it."""
        if self.mode == ONE_TOKEN:
            return DecodingSettings(tau=1.0)
        named: dict[str, Any] = {"rule": self.rule, "tau": self.tau, "block_size": self.block_size}
        if self.decoder == "mars":
            named |= {"exact": self.mode == "exact", "adaptive": self.adaptive}
        return settings_for(checkpoint, named, decoder=self.decoder)


def check_modes(modes: Sequence[str], rules: Sequence[str], *, draft: bool, heads: bool) -> None:
    """See that a sweep's modes and rules are known and have what they need; said before a model is loaded.

    Raises:
        MarsError: one is not, or lacks it.
    """
    known = ("exact", "lossy", *DECODERS[1:])
    for mode in modes:
        if mode not in known:
            raise MarsError(f"--modes has {mode!r}, expected some of {', '.join(known)}.")
        check_decoder(Cell(mode).decoder, draft=draft, heads=heads)
    for rule in rules:
        if rule not in TAUS:
            raise MarsError(f"--rules has {rule!r}, expected some of {', '.join(TAUS)}.")


def grid(
    checkpoint: Checkpoint,
    *,
    taus: Sequence[float] | None = None,
    block_sizes: Sequence[int] | None = None,
    rules: Sequence[str] = ("probability",),
    modes: Sequence[str] = ("exact", "lossy"),
    adaptive: bool | None = None,
) -> list[Cell]:
    """All cells for a checkpoint, one-token mode first; a model without MARS settings has that one alone.

    Args:
        checkpoint: it bounds B, and knows no cells but one-token mode and baselines without MARS settings.
        taus: for every rule; None: each rule's own (`TAUS`).
        block_sizes: None: the trained B.
        modes, rules: as `check_modes` passes them.
        adaptive: False: exact mode with all masks; True: lossy mode with those that pay.
    Raises:
        MarsError: a value that no decoding takes, or a B above the trained one.
    """
    cells = [Cell(ONE_TOKEN)]
    trained = checkpoint.mars.block_size if checkpoint.mars else 1
    for mode in modes:
        drafts = mode in ("exact", "lossy")
        if drafts and checkpoint.mars is None:
            continue
        for size in block_sizes or [None]:  # type: ignore[list-item]
            if size is not None and size > trained and (drafts or mode == "block-diffusion"):
                raise MarsError(f"B = {size} is above the {trained} that this checkpoint was trained with.")
            if not drafts and mode != "block-diffusion":
                cells.append(Cell(mode, block_size=size))
                continue
            for rule in rules:
                for tau in taus or TAUS[rule]:
                    DecodingSettings(rule=rule, tau=tau)  # type: ignore[arg-type]
                    # One-token mode is there already; block diffusion at tau 1 is another thing.
                    if drafts and rule == "probability" and tau >= 1:
                        continue
                    wide = None if adaptive is (mode == "exact") else adaptive  # None: the mode's default
                    cells.append(Cell(mode, rule, float(tau), size, wide))
    return list(dict.fromkeys(cells))


@dataclasses.dataclass
class Contestant:
    """A checkpoint in a sweep.

    Args:
        label: its line's name, and its folder's.
        load: gives the checkpoint, when its turn comes.
    """

    label: str
    load: Callable[[], Checkpoint]
    draft: Checkpoint | None = None
    heads: str | None = None


def sweep(
    contestants: Sequence[Contestant],
    cells_of: Callable[[Checkpoint], list[Cell]],
    names: Sequence[str],
    options: EvaluationOptions,
    output: Path,
    *,
    add: bool = False,
    say: Say = lambda sentence: None,
) -> dict[str, Any]:
    """Run every cell that is not finished, and write sweep.json, table.md and the plots.

    Args:
        contestants: the checkpoints.
        cells_of: the cells of a checkpoint (`grid`).
        names: tasks.
        options: rows, format, batch.
        output: the folder; OUTPUT/LABEL/CELL/results.json is a cell's.
        add: let checkpoints join a folder that has others only.
        say: takes progress, a sentence each.
    Returns:
        What sweep.json holds: `rows`, one a cell.
    Raises:
        MarsError: the folder is of another checkpoint, or a cell cannot be run.
    """
    _check_folder(output, [contestant.label for contestant in contestants], add)
    for contestant in contestants:
        checkpoint = contestant.load()
        folder = output / contestant.label
        _check_label(folder, contestant.label, fingerprint(checkpoint))
        cells = cells_of(checkpoint)
        for number, cell in enumerate(cells, start=1):
            settings = cell.settings(checkpoint)
            say(f"{contestant.label} {cell.name} ({number} of {len(cells)})")
            parts = evaluate(
                checkpoint,
                names,
                settings,
                options,
                model=contestant.label,
                output=folder / cell.name,
                decoder=cell.decoder,
                decode=_decoder(cell, checkpoint, contestant, options),
                say=say if number == 1 else lambda sentence: None,
            )
            write_json(
                folder / cell.name / "cell.json",
                {**dataclasses.asdict(cell), "label": contestant.label, "tasks": list(parts)},
            )
            del parts
        del checkpoint
    result: dict[str, Any] = {"rows": collect(output), "provenance": provenance()}
    write_json(output / "sweep.json", result)
    (output / "table.md").write_text(sweep_table(result["rows"]) + "\n", encoding="utf-8")
    plot_frontier(result["rows"], output)
    plot_rules(result["rows"], output)
    return result


def collect(output: Path) -> list[dict[str, Any]]:
    """Every finished cell below a folder as one flat row; its checkpoint's one-token mode measures speed."""
    rows = []
    for file in sorted(output.glob("*/*/cell.json")):
        cell = read_json(file)
        parts = read_json(file.parent / "results.json")["parts"]
        parts = {name: parts[name] for name in cell["tasks"] if name in parts}
        tokens = sum(part["speed"].get("tokens", 0) for part in parts.values())
        forwards = sum(part["speed"].get("forwards", 0) for part in parts.values())
        seconds = sum(part["speed"].get("seconds", 0.0) for part in parts.values())
        rows.append(
            {
                **{name: cell[name] for name in ("label", "mode", "rule", "tau", "block_size")},
                "masks": _masks(cell["mode"], cell.get("adaptive")),
                "scores": {name: part["score"] for name, part in parts.items()},
                "titles": {name: part["title"] for name, part in parts.items()},
                "mean": mean_score(parts),
                "tokens_per_forward": tokens / forwards if forwards else None,
                "tokens_per_second": tokens / seconds if seconds else None,
            }
        )
    base = {row["label"]: row for row in rows if row["mode"] == ONE_TOKEN}
    for row in rows:
        reference = base.get(row["label"], {}).get("tokens_per_second")
        rate = row["tokens_per_second"]
        row["speed_up"] = rate / reference if rate and reference else None
    order = {ONE_TOKEN: 0, "exact": 1, "lossy": 2}
    rows.sort(key=lambda row: (row["label"], order.get(row["mode"], 3), row["mode"]))
    return rows


def _masks(mode: str, adaptive: bool | None) -> str | None:
    """Whether a cell placed all masks or those that paid; None where there are none to place."""
    if mode not in ("exact", "lossy"):
        return None
    return "adaptive" if DecodingSettings(exact=mode == "exact", adaptive=adaptive).adapts else "all"


def label_of(name: str) -> str:
    """A checkpoint's name as a folder's."""
    path = Path(name)
    kept = f"{path.parent.name}-{path.name}" if path.name == "final" else path.name or name
    return re.sub(r"[^\w.+-]+", "-", kept).strip("-.") or "model"


def _decoder(
    cell: Cell, checkpoint: Checkpoint, contestant: Contestant, options: EvaluationOptions
) -> Decode:
    return make_decoder(
        cell.decoder,
        checkpoint,
        max_rows=options.batch_size,
        draft=contestant.draft,
        heads=contestant.heads,
    )


def _check_folder(output: Path, labels: list[str], add: bool) -> None:
    if len(set(labels)) < len(labels):
        raise MarsError(f"Two checkpoints have the same label ({', '.join(labels)}): give each its own.")
    there = [file.parent.name for file in output.glob("*/checkpoint.json") if _holds_cells(file.parent)]
    if there and not add and not set(there) & set(labels):
        raise MarsError(
            f"{output} has results of another checkpoint ({', '.join(sorted(there))}): name another "
            "--output, or let this one join with --add."
        )


def _holds_cells(folder: Path) -> bool:
    """Whether a checkpoint's folder has any result: one that was refused leaves none."""
    return any(holds_results(file.parent) for file in folder.glob("*/results.json"))


def _check_label(folder: Path, label: str, mark: str) -> None:
    file = folder / "checkpoint.json"
    if file.is_file() and _holds_cells(folder):
        kept = read_json(file)["checkpoint"]
        if kept != mark:
            raise MarsError(
                f"{folder} has results of another checkpoint called {label} ({kept}; this is {mark}): name "
                "another --output, or another --label."
            )
    write_json(file, {"checkpoint": mark, "label": label})
