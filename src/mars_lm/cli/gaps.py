"""`mars gaps`: what each of the four gaps between AR and block diffusion costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mars_lm.cli import evaluate as common
from mars_lm.cli import options
from mars_lm.cli.terminal import Terminal
from mars_lm.errors import MarsError


def gaps(
    text: Annotated[
        Path,
        typer.Argument(help="A text, or .jsonl rows with 'messages', 'prompt' and 'completion', or 'text'."),
    ],
    model: options.Model = None,
    adapter: options.Adapter = None,
    before: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="The model before MARS training, beside it in table and picture.",
            show_default="the base of the packaged model",
        ),
    ] = None,
    dtype: options.Dtype = "float32",
    block_size: options.BlockSize = None,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="The first N rows.")] = 64,
    length: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of a row.")] = 256,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write gaps.json, gaps.md and gaps.png there.")
    ] = None,
    no_color: options.NoColor = False,
) -> None:
    """Open each gap to AR alone, and all together: nats per token and top-1 agreement, by distance."""
    common.check_extra()
    terminal = Terminal(no_color=no_color)
    from mars_lm import checkpoint as checkpoints
    from mars_lm.evaluation import gap_report

    loaded = options.load_checkpoint(model, adapter, dtype, terminal=terminal)
    if loaded.mars is None and block_size is None:
        terminal.note("B is 4: the model has no MARS settings that would say another.")
    size = block_size or (loaded.mars.block_size if loaded.mars else 4)
    if size < 2:
        raise MarsError("B is 1, which has no masks and no gaps: give --block-size 2 or more.")
    models = {"after" if loaded.mars else "model": loaded}
    if before is not None:
        models = {"before": checkpoints.load(before, dtype=dtype), **models}
    elif model is None and adapter is None:
        models = {"before": checkpoints.load_base(dtype=dtype), **models}
    report = gap_report.report(models, text, block_size=size, rows=rows, length=length)
    print(report.text)
    if output is not None:
        gap_report.write(report, output)
        terminal.note(f"Written to {output}.")
