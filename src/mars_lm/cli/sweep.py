"""`mars sweep`: tau x B x rule x exact or not, on some tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mars_lm.cli import evaluate as common
from mars_lm.cli import options
from mars_lm.cli.terminal import Terminal
from mars_lm.errors import MarsError

_GRID = "Grid"


def sweep(
    output: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Results of each cell, sweep.json, table.md and the plots."),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="A checkpoint; several make a line each.",
            show_default="the packaged model",
            rich_help_panel="Model",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What each is called, in order.", rich_help_panel="Model"),
    ] = None,
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    add: Annotated[
        bool, typer.Option("--add", help="Let checkpoints join a folder of others.", rich_help_panel="Model")
    ] = False,
    tau: Annotated[
        list[float] | None,
        typer.Option(
            metavar="NUMBER", help="Repeatable.", show_default="five for each rule", rich_help_panel=_GRID
        ),
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="B", help="Repeatable.", show_default="the trained B", rich_help_panel=_GRID
        ),
    ] = None,
    rules: Annotated[
        str, typer.Option(metavar="NAMES", help="Of probability, margin, entropy.", rich_help_panel=_GRID)
    ] = "probability",
    modes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Of exact, lossy, block-diffusion, jacobi, medusa, prompt-lookup, assisted.",
            rich_help_panel=_GRID,
        ),
    ] = "exact,lossy",
    adaptive: options.Adaptive = None,
    draft: common.Draft = None,
    heads: common.Heads = None,
    tasks: common.Tasks = "paper",
    data: common.Data = None,
    limit: common.Limit = None,
    batch_size: common.BatchSize = 16,
    num_fewshot: common.Fewshot = None,
    max_new_tokens: common.Budget = None,
    chat_template: common.ChatTemplate = None,
    run_generated_code: common.RunCode = False,
    no_color: options.NoColor = False,
) -> None:
    """Evaluate every way of decoding, and draw accuracy against speed; a sweep that was stopped goes on.

    One-token mode is always among them: speed-up is measured against it.
    """
    common.check_extra()
    terminal = Terminal(no_color=no_color)
    wanted = common.evaluation_options(
        data, limit, batch_size, chat_template, num_fewshot, max_new_tokens, run_generated_code
    )
    from mars_lm.evaluation import sweep as sweeps
    from mars_lm.evaluation import tables
    from mars_lm.evaluation import tasks as task_loading

    names = options.names(tasks)
    task_loading.choose(names, data=data, run_code=run_generated_code)
    sweeps.check_modes(
        options.names(modes), options.names(rules), draft=draft is not None, heads=heads is not None
    )
    models = model or [None]  # type: ignore[list-item]
    if adapter is not None and len(models) > 1:
        raise MarsError("--adapter goes with one --model: `mars convert` merges the others.")
    if label and len(label) != len(models):
        raise MarsError(f"There are {len(models)} models and {len(label)} labels: give one each.")
    default = "packaged" if model is None and adapter is None else ""
    drafting = common.load_draft(draft, dtype)

    def load(name: str | None) -> Any:
        return lambda: options.load_checkpoint(name, adapter, dtype, terminal=terminal)

    contestants = [
        sweeps.Contestant(
            label=label[i] if label else default or sweeps.label_of(str(name or adapter)),
            load=load(name),
            draft=drafting,
            heads=heads,
        )
        for i, name in enumerate(models)
    ]
    result = sweeps.sweep(
        contestants,
        lambda checkpoint: sweeps.grid(
            checkpoint,
            taus=tau,
            block_sizes=block_size,
            rules=options.names(rules),
            modes=options.names(modes),
            adaptive=adaptive,
        ),
        names,
        wanted,
        output,
        add=add,
        say=terminal.note,
    )
    print(tables.sweep_table(result["rows"]))
