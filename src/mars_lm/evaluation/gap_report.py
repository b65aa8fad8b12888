"""The gap table of one or two models, with the AR share against B, as text, JSON and picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mars_lm.checkpoint import Checkpoint, make_mars_ready
from mars_lm.evaluation.gaps import ar_shares, measure_gaps
from mars_lm.evaluation.plots import plot_gaps
from mars_lm.evaluation.results import write_json
from mars_lm.evaluation.tables import ar_share_table, gaps_table
from mars_lm.evaluation.text_rows import read_examples
from mars_lm.provenance import provenance

BLOCK_SIZES = (2, 4, 8, 16, 32)


@dataclasses.dataclass
class GapReport:
    """What was measured, and the tables of it.

    Attributes:
        results: by model, what `measure_gaps` returns.
        shares: what `ar_shares` returns.
        text: both as Markdown.
    """

    results: dict[str, dict[str, Any]]
    shares: list[dict[str, Any]]
    text: str


def report(
    models: dict[str, Checkpoint], path: Path, *, block_size: int, rows: int = 64, length: int = 256
) -> GapReport:
    """Measure models on the same text.

    A model without MARS settings is measured with the mask token that MARS training would start with: a row
    at the mean of the others.

    Args:
        models: by the name that the table gives them; the last is shown by distance.
        path: the text, as `read_examples` takes it.
        block_size: B.
        rows, length: how many rows of at most how many tokens.
    Raises:
        MarsError: a text that can't be read, or a model that cannot be made MARS-ready.
    """
    results, shares = {}, []
    for name, checkpoint in models.items():
        mars = checkpoint.mars
        if mars is None:
            mars = make_mars_ready(
                checkpoint.model, checkpoint.tokenizer, block_size=block_size, base_model=None
            )
        examples = read_examples(checkpoint, path, length=length, limit=rows)
        results[name] = measure_gaps(
            checkpoint.model, examples, block_size=block_size, mask_token_id=mars.mask_token_id
        )
        shares = ar_shares(examples, BLOCK_SIZES)
    text = f"{gaps_table(results)}\n\n{ar_share_table(shares)}"
    return GapReport(results, shares, text)


def write(found: GapReport, folder: Path) -> None:
    """gaps.json, gaps.md and gaps.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "gaps.json",
        {"models": found.results, "ar_share": found.shares, "provenance": provenance(seed=0)},
    )
    (folder / "gaps.md").write_text(found.text + "\n", encoding="utf-8")
    plot_gaps(found.results, found.shares, folder / "gaps.png")
