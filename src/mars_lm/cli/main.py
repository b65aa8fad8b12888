"""The `mars` command. Each command's module is light to import: torch is loaded when a command runs."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

import mars_lm
from mars_lm.cli import calibrate, chat, convert, demo, evaluate, gaps, generate, knob, serve, sweep, train
from mars_lm.errors import MarsError

app = typer.Typer(
    name="mars",
    help="Language models that answer several tokens per forward pass (MARS).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(demo.demo)
app.command()(convert.convert)
app.command()(train.train)
app.command("eval")(evaluate.evaluate)
app.command()(sweep.sweep)
app.command()(calibrate.calibrate)
app.command()(gaps.gaps)
# What `serve` does not know may be a flag of vLLM's.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.serve)
app.command()(knob.knob)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mars-lm {mars_lm.__version__}")
        raise typer.Exit


@app.callback()
def _mars(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _show_warning(
    message: Warning | str, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Ours as a sentence; the libraries' are about their own insides, and `python -W` still shows them."""
    if Path(filename).is_relative_to(Path(mars_lm.__file__).parent):
        print(f"mars: {message}", file=sys.stderr)


def main() -> None:
    """Run `mars`; a user's mistake is one sentence on stderr, and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal whose encoding lacks a character of the answer shows a question mark, not a stack trace.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    if not sys.warnoptions:
        warnings.showwarning = _show_warning
    try:
        app()
    except MarsError as error:
        print(f"mars: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
