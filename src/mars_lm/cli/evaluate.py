"""`mars eval`: benchmarks of lm-evaluation-harness, with the speed beside each score."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mars_lm.cli import options
from mars_lm.cli.terminal import Terminal
from mars_lm.errors import MarsError

if TYPE_CHECKING:
    from mars_lm.evaluation.run import EvaluationOptions

_ROWS, _DECODERS = "Rows and format", "Other decoders"

Tasks = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Tasks or groups of lm-evaluation-harness, with commas; `paper` is the six of the MARS paper.",
        rich_help_panel=_ROWS,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Rows from a local folder (FOLDER/gsm8k/test.jsonl, …).",
        show_default="from the Hub",
        rich_help_panel=_ROWS,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="The first N rows of each task.", rich_help_panel=_ROWS),
]
BatchSize = Annotated[
    int, typer.Option(min=1, metavar="N", help="How many prompts at a time.", rich_help_panel=_ROWS)
]
Fewshot = Annotated[
    int | None,
    typer.Option(
        "--num-fewshot",
        min=0,
        metavar="N",
        help="Worked examples in the prompt.",
        show_default="the task's",
        rich_help_panel=_ROWS,
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        min=1,
        metavar="N",
        help="The most tokens of an answer.",
        show_default="the task's; 256 for `paper`",
        rich_help_panel=_ROWS,
    ),
]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Prompts in the chat template.",
        show_default="where there is one",
        rich_help_panel=_ROWS,
    ),
]
RunCode = Annotated[
    bool,
    typer.Option(
        "--run-generated-code",
        help="Let HumanEval run what the model wrote: confined, without network, 10 seconds, 1 GB.",
        rich_help_panel=_ROWS,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="The draft model of `assisted`.", rich_help_panel=_DECODERS),
]
Heads = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="The heads of `medusa`.", rich_help_panel=_DECODERS),
]


def evaluate(
    model: options.Model = None,
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    tasks: Tasks = "paper",
    data: Data = None,
    limit: Limit = None,
    batch_size: BatchSize = 16,
    num_fewshot: Fewshot = None,
    max_new_tokens: Budget = None,
    chat_template: ChatTemplate = None,
    run_generated_code: RunCode = False,
    exact: options.Exact = None,
    tau: options.Tau = None,
    rule: options.DraftRule = None,
    block_size: options.BlockSize = None,
    adaptive: options.Adaptive = None,
    decoder: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="mars, or a baseline: block-diffusion, jacobi, medusa, prompt-lookup, assisted.",
            rich_help_panel=_DECODERS,
        ),
    ] = "mars",
    draft: Draft = None,
    heads: Heads = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Keep results, answers and samples there; a run that was stopped goes on."
        ),
    ] = None,
    no_color: options.NoColor = False,
) -> None:
    """Evaluate a model on benchmarks, with tokens per forward and tokens per second beside each score."""
    check_extra()
    named = options.asked(exact=exact, tau=tau, rule=rule, block_size=block_size, adaptive=adaptive)
    wanted = evaluation_options(
        data, limit, batch_size, chat_template, num_fewshot, max_new_tokens, run_generated_code
    )
    terminal = Terminal(no_color=no_color)
    from mars_lm.evaluation import decoders, tables
    from mars_lm.evaluation import tasks as task_loading
    from mars_lm.evaluation.run import evaluate as run

    names = options.names(tasks)
    # Said before a model is loaded.
    task_loading.choose(names, data=data, run_code=run_generated_code)
    decoders.check_decoder(decoder, draft=draft is not None, heads=heads is not None)
    checkpoint = options.load_checkpoint(model, adapter, dtype, terminal=terminal)
    parts = run(
        checkpoint,
        names,
        decoders.settings_for(checkpoint, named, decoder=decoder),
        wanted,
        model=model or adapter or "packaged model",
        output=output,
        decoder=decoder,
        decode=decoders.make_decoder(
            decoder,
            checkpoint,
            max_rows=batch_size,
            draft=load_draft(draft, dtype),
            heads=heads,
        ),
        say=terminal.note,
    )
    table = tables.evaluation_table(parts)
    if output is not None:
        (output / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)


def check_extra() -> None:
    """See that the libraries of the extra `eval` are there.

    Raises:
        MarsError: they are not.
    """
    missing = [
        name for name in ("lm_eval", "datasets", "matplotlib") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise MarsError(f"Evaluation needs {', '.join(missing)}: pip install 'mars-lm[eval]'.")


def evaluation_options(
    data: Path | None,
    limit: int | None,
    batch_size: int,
    chat_template: bool | None,
    fewshot: int | None,
    max_new_tokens: int | None,
    run_code: bool,
) -> EvaluationOptions:
    """The options of `eval` and `sweep` that are not about the model."""
    from mars_lm.evaluation.run import EvaluationOptions

    return EvaluationOptions(
        data=data,
        limit=limit,
        batch_size=batch_size,
        chat_template=chat_template,
        fewshot=fewshot,
        max_new_tokens=max_new_tokens,
        run_code=run_code,
    )


def load_draft(name: str | None, dtype: str) -> Any:
    """The draft model of assisted generation, if one is named."""
    if name is None:
        return None
    from mars_lm import checkpoint

    return checkpoint.load(name, dtype=dtype)
