"""`mars calibrate`: find tau from prompts, without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mars_lm.cli import evaluate as common
from mars_lm.cli import options
from mars_lm.cli.terminal import Terminal
from mars_lm.errors import MarsError
from mars_lm.settings import Rule


def calibrate(
    prompts: Annotated[
        Path,
        typer.Argument(metavar="PROMPTS.jsonl", help="Rows with 'prompt' or 'messages'; no answers needed."),
    ],
    model: options.Model = None,
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    exact: Annotated[
        bool,
        typer.Option(
            "--exact/--lossy",
            help="Exact: the tau that is fastest here. Lossy: the tau that keeps --agreement with AR.",
        ),
    ] = True,
    agreement: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, metavar="SHARE", help="Lossy: the share of tokens that are to be AR's own."
        ),
    ] = 0.99,
    rule: Annotated[Rule, typer.Option(help="What tau limits.")] = "probability",
    tau: Annotated[
        list[float] | None,
        typer.Option(metavar="NUMBER", help="Try these; repeatable.", show_default="a grid"),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="The first N prompts.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of an answer.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="How many prompts at a time.")] = 8,
    turns: Annotated[int, typer.Option(min=1, metavar="N", help="Exact: how often all are timed.")] = 3,
    write: Annotated[
        bool, typer.Option("--write", help="Put the result into the checkpoint's settings, as its default.")
    ] = False,
    no_color: options.NoColor = False,
) -> None:
    """Find the tau that keeps a wanted agreement with AR (--lossy), or that is fastest here (--exact).

    Every number comes with its 95% confidence interval.
    """
    common.check_extra()
    terminal = Terminal(no_color=no_color)
    named = adapter or model
    target = Path(named) if named else None
    if write and (target is None or not target.is_dir()):
        raise MarsError(
            "--write needs a local checkpoint (--model FOLDER): the packaged model and the Hub's are not "
            "changed; `mars convert` makes a folder."
        )
    from mars_lm.evaluation import calibration, tables, text_rows

    checkpoint = options.load_checkpoint(model, adapter, dtype, terminal=terminal)
    asked = text_rows.read_prompts(checkpoint, prompts, limit=rows)
    if exact:
        result = calibration.calibrate_exact(
            checkpoint,
            asked,
            rule=rule,
            taus=tau,
            max_new_tokens=max_new_tokens,
            max_rows=batch_size,
            turns=turns,
        )
    else:
        result = calibration.calibrate_lossy(
            checkpoint,
            asked,
            agreement=agreement,
            rule=rule,
            taus=tau,
            max_new_tokens=max_new_tokens,
            max_rows=batch_size,
        )
    print(tables.calibration_table(result.rows))
    print(result.remark)
    if write and target is not None:
        file = calibration.write_decoding(target, result.decoding)
        terminal.note(f"Written to {file}: {result.decoding}")
