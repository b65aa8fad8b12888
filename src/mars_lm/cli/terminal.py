"""What commands show: an answer that streams, its closing line, and a Ctrl-C that stops it politely.

Colour goes to a terminal only, and never where `--no-color` or `NO_COLOR` (https://no-color.org) asks for
none. Without colour, stdout carries the text alone, and everything else goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mars_lm.errors import MarsError

if TYPE_CHECKING:
    from rich.console import Console

    from mars_lm.checkpoint import Checkpoint
    from mars_lm.decoding import GenerationResult
    from mars_lm.settings import DecodingSettings

# Four colours of the 256-colour cube that read on a dark and on a light ground; neighbours differ in hue and
# in brightness, so that they can be told apart without full colour vision.
_FORWARD_COLOURS = (33, 208, 35, 170)
_RESET = "\x1b[0m"
_DIM = "\x1b[2m"
_BOLD = "\x1b[1m"

# A model's text is data: an escape sequence in it must not move the cursor or retitle the window.
_CONTROL_CHARACTERS: dict[int, str | None] = {
    **{code: "\ufffd" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"},
    ord("\r"): None,
}


@dataclasses.dataclass
class Answer:
    """One finished answer: its text, and the numbers that belong to it."""

    text: str
    result: GenerationResult
    interrupted: bool

    @property
    def tokens(self) -> int:
        return len(self.result.token_ids)

    @property
    def seconds(self) -> float:
        return self.result.prefill_seconds + self.result.decode_seconds


class Terminal:
    """Where a command prints.

    Args:
        no_color: the `--no-color` flag.
    """

    def __init__(self, *, no_color: bool = False) -> None:
        self.stdout_is_terminal = sys.stdout.isatty()
        self.colour = (
            self.stdout_is_terminal
            and not no_color
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )

    def console(self) -> Console:
        """A rich console on stdout, for tables, under the same rule of colour."""
        from rich.console import Console

        # NO_COLOR alone would leave rich its bold face; plain text has neither.
        return Console(force_terminal=self.colour, no_color=not self.colour, highlight=False)

    def note(self, sentence: str) -> None:
        """A remark about the run, apart from the text."""
        self._aside(sentence, sys.stderr)

    def heading(self, sentence: str) -> None:
        """A line above a text, part of what the command prints."""
        print(f"{_BOLD}{sentence}{_RESET}" if self.colour else sentence, flush=True)

    def remark(self, sentence: str) -> None:
        """A line about a text: dim beside a coloured one, on stderr beside a plain one."""
        self._aside(sentence, sys.stdout if self.colour else sys.stderr)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show what the user waits for, on a terminal, until it is there."""
        shown = self.colour and sys.stderr.isatty()
        if shown:
            print(f"{_DIM}{what}{_RESET}", end="", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            if shown:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def answer(
        self, checkpoint: Checkpoint, engine: Any, prompt_ids: Sequence[int], settings: DecodingSettings
    ) -> Answer:
        """Generate and print an answer while it comes; Ctrl-C ends it after the forward at work.

        Tokens of one forward share a colour. The last line is ended, and the closing line printed.

        Raises:
            MarsError: the engine refuses the request, or the model fails on it.
        """
        from mars_lm.detokenizer import Detokenizer

        request = engine.add(prompt_ids, settings)
        pieces = Detokenizer(checkpoint.tokenizer)
        text = ""
        with interruption() as interrupted:
            for number, output in enumerate(engine.stream()):
                text += self._show(pieces.push(output.new_token_ids), number)
                if interrupted and output.finish_reason is None:
                    engine.cancel(request)
                    break
            text += self._show(pieces.finish(), 0)
        if not text.endswith("\n"):
            self._show("\n", 0)
        answer = Answer(text, engine.result(request), bool(interrupted))
        if answer.result.error:
            raise MarsError(answer.result.error)
        cut = " · cut at the token limit" if answer.result.finish_reason == "length" else ""
        self.remark(closing_line(answer.tokens, answer.result.forwards, answer.seconds) + cut)
        return answer

    def _show(self, piece: str, number: int) -> str:
        if piece:
            shown = piece.translate(_CONTROL_CHARACTERS) if self.stdout_is_terminal else piece
            if self.colour and not piece.isspace():
                shown = f"\x1b[38;5;{_FORWARD_COLOURS[number % len(_FORWARD_COLOURS)]}m{shown}{_RESET}"
            sys.stdout.write(shown)
            sys.stdout.flush()
        return piece

    def _aside(self, sentence: str, stream: Any) -> None:
        dim = self.colour and stream.isatty()
        print(f"{_DIM}{sentence}{_RESET}" if dim else sentence, file=stream, flush=True)


def closing_line(tokens: int, forwards: int, seconds: float) -> str:
    """Tokens, forwards, tokens per forward and tokens per second (prefill included) in one line."""
    per_forward = tokens / forwards if forwards else 0.0
    per_second = tokens / seconds if seconds else 0.0
    return (
        f"{plural(tokens, 'token')} · {plural(forwards, 'forward')} · {per_forward:.2f} tokens per forward · "
        f"{per_second:.1f} tokens per second"
    )


class RowsProgress:
    """A bar on stderr for many rows, with the numbers so far."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task
        self._tokens = self._forwards = 0
        self._since = time.perf_counter()

    def count(self, tokens: int, forwards: int) -> None:
        """Add a finished row's numbers."""
        self._tokens += tokens
        self._forwards += forwards
        self._bar.update(
            self._task, speed=f"{self._tokens / (time.perf_counter() - self._since):.0f} tokens/s"
        )

    def advance(self) -> None:
        """One more row is written."""
        self._bar.advance(self._task)

    def closing_line(self) -> str:
        """As below one answer; the seconds are the whole run's."""
        return closing_line(self._tokens, self._forwards, time.perf_counter() - self._since)


@contextlib.contextmanager
def rows_progress(*, total: int, done: int) -> Iterator[RowsProgress]:
    """Show how far a file of rows is; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        yield RowsProgress(bar, bar.add_task("rows", total=total, completed=done, speed=""))


def quiet_libraries() -> None:
    """Keep transformers' bars and remarks out of what a command prints; a download still shows its bar."""
    import functools

    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The bar over a GGUF file's tensors asks no one.
    gguf.tqdm = functools.partial(gguf.tqdm, disable=True)


def plural(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Interruption:
    """True once Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.pressed = False

    def __bool__(self) -> bool:
        return self.pressed


@contextlib.contextmanager
def interruption() -> Iterator[Interruption]:
    """Turn the first Ctrl-C into a flag, so that the forward at work ends; a second one raises."""
    flag = Interruption()

    def press(signum: int, frame: Any) -> None:
        if flag:
            raise KeyboardInterrupt
        flag.pressed = True

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)
