"""The options that `generate`, `chat` and `demo` share, and what they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mars_lm.cli.terminal import Terminal, quiet_libraries
from mars_lm.settings import DecodingSettings, Rule

if TYPE_CHECKING:
    from mars_lm.checkpoint import Checkpoint

Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME_OR_PATH",
        help="A Hub id, a folder or a .gguf file. Without it: the packaged SmolLM2-135M-Instruct.",
        rich_help_panel="Model",
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="A LoRA adapter, merged into --model, or into the base that it names.",
        rich_help_panel="Model",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        help="float32, bfloat16, float16, int8 (CPU), or auto: bfloat16 where the processor computes in it.",
        rich_help_panel="Model",
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--lossy",
        help="Exact (the default): the words of one-token decoding. Lossy: drafts accepted on trust in tau.",
        show_default=False,
        rich_help_panel="Decoding",
    ),
]
Tau = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="Confidence that a drafted token needs; 1 is one-token mode.",
        show_default="exact: all pass, lossy: 0.95",
        rich_help_panel="Decoding",
    ),
]
DraftRule = Annotated[
    Rule | None,
    typer.Option(
        "--rule",
        help="What tau limits: a token's probability, its margin over the second, or the entropy (nats).",
        show_default="probability",
        rich_help_panel="Decoding",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        metavar="B",
        help="The most tokens of one forward, up to the trained B.",
        show_default="the trained B",
        rich_help_panel="Decoding",
    ),
]
Adaptive = Annotated[
    bool | None,
    typer.Option(
        "--adaptive/--all-masks",
        help="Only the masks that pay in tokens per second here (exact mode's default; a lossy text then "
        "depends on the load), or always all.",
        show_default=False,
        rich_help_panel="Decoding",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="The most tokens of an answer.", show_default="256", rich_help_panel="Decoding"
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="Above 0: draw each token, in exact mode from AR's own distribution.",
        show_default="0, greedy",
        rich_help_panel="Sampling",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(metavar="K", help="Draw from the K best tokens; 0 is all.", rich_help_panel="Sampling"),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="Draw from the best tokens of so much probability.", rich_help_panel="Sampling"
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Draw from tokens of at least this share of the best one's probability.",
        rich_help_panel="Sampling",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", help="The same seed draws the same text.", rich_help_panel="Sampling"),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="The system message, in place of the model's own.")
]
NoColor = Annotated[bool, typer.Option("--no-color", help="Plain text, as in a pipe or with NO_COLOR set.")]


def asked(**values: Any) -> dict[str, Any]:
    """The decoding settings that the command line names.

    Raises:
        MarsError: a value is out of range. Said before a model is loaded.
    """
    named = {name: value for name, value in values.items() if value is not None}
    DecodingSettings(**named)
    return named


def names(listed: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in listed.split(",") if name.strip()]


def load_checkpoint(model: str | None, adapter: str | None, dtype: str, *, terminal: Terminal) -> Checkpoint:
    """The checkpoint that `--model`, `--adapter` and `--dtype` name; the packaged one where none is named.

    Raises:
        MarsError: there is no such model, or it can't be used.
    """
    from mars_lm import base_weights, checkpoint

    quiet_libraries()
    if model is None and adapter is None:
        base_weights.find_or_fetch()  # has a progress bar of its own
    with terminal.waiting("Loading the model …"):
        if model is not None:
            loaded = checkpoint.load(model, adapter=adapter, dtype=dtype)
        elif adapter is not None:
            loaded = checkpoint.load(adapter, dtype=dtype)  # an adapter's folder names its base
        else:
            loaded = checkpoint.load_default(dtype=dtype)
    if loaded.mars is None:
        terminal.note(f"{model or adapter} has no MARS settings: an ordinary model, one token per forward.")
    return loaded
