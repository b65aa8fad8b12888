"""`mars chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mars_lm.cli import options
from mars_lm.cli.terminal import Terminal, plural
from mars_lm.errors import MarsError
from mars_lm.settings import decoding_settings

if TYPE_CHECKING:
    from mars_lm.checkpoint import Checkpoint

PROMPT = "> "
COMMANDS = """\
/tau X         confidence that a drafted token needs; 1 is one-token mode
/exact         the words of one-token decoding (the default)
/lossy         drafts on trust in tau
/system TEXT   a system message, from the next answer on; without TEXT, the model's own
/reset         forget the conversation
/exit          leave (so does Ctrl-D); Ctrl-C stops an answer"""


def chat(
    model: options.Model = None,
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    exact: options.Exact = None,
    tau: options.Tau = None,
    rule: options.DraftRule = None,
    block_size: options.BlockSize = None,
    adaptive: options.Adaptive = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    system: options.System = None,
    # Means nothing here; scripts give both commands the same flags.
    batch_size: Annotated[int, typer.Option(min=1, hidden=True)] = 1,
    no_color: options.NoColor = False,
) -> None:
    """Talk to a model; /help lists the commands.

    Where stdin is a pipe, each of its lines is a message.
    """
    named = options.asked(
        exact=exact,
        tau=tau,
        rule=rule,
        block_size=block_size,
        adaptive=adaptive,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    terminal = Terminal(no_color=no_color)
    checkpoint = options.load_checkpoint(model, adapter, dtype, terminal=terminal)
    conversation = Conversation(checkpoint, named, system, terminal)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history for `input`)
        terminal.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            line = input(PROMPT) if interactive else _next_line()
        except KeyboardInterrupt:
            print()
            continue
        except UnicodeDecodeError:
            raise MarsError("The message on stdin is not UTF-8 text.") from None
        except EOFError:
            if interactive:
                print()
            return
        if not line.strip():
            continue
        try:
            if conversation.take(line) == "exit":
                return
        except MarsError as error:
            # A slip in one message ends neither the program nor the conversation.
            terminal.note(f"mars: {error}")
        except KeyboardInterrupt:
            conversation.start_engine()
            print()


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


class Conversation:
    """The messages so far, and what the next answer is generated with.

    Args:
        named: the decoding settings that the command line and the commands since then name.
        system: the system message; None leaves the chat template its own.
    """

    def __init__(
        self, checkpoint: Checkpoint, named: dict[str, Any], system: str | None, terminal: Terminal
    ) -> None:
        self.checkpoint = checkpoint
        self.named = named
        self.system = system
        self.terminal = terminal
        self.turns: list[dict[str, str]] = []
        self.start_engine()

    def start_engine(self) -> None:
        """A fresh engine; also after a second Ctrl-C, which may have cut a forward in the middle."""
        from mars_lm.decoding import Engine

        self.engine = Engine(self.checkpoint, max_rows=1)

    def take(self, line: str) -> str | None:
        """Answer a message, or do what a command says; `exit` if it says so.

        Raises:
            MarsError: an unknown command, a bad value, or a message that can't be answered.
        """
        line = line.strip()
        word, _, rest = line.partition(" ")
        # "/etc/passwd" opens a question, not a command.
        if word.startswith("/") and "/" not in word[1:]:
            return self._obey(word, rest.strip())
        self._answer(line)
        return None

    def _obey(self, command: str, value: str) -> str | None:
        match command:
            case "/exit" | "/quit":
                return "exit"
            case "/help":
                self.terminal.note(COMMANDS)
            case "/reset":
                self.turns.clear()
                self.terminal.note("The conversation starts anew.")
            case "/tau":
                self._name(tau=_number(value))
            case "/exact":
                self._name(exact=True)
            case "/lossy":
                self._name(exact=False)
            case "/system":
                self.system = value or None
                self.terminal.note(f"The system message is {'set' if value else 'the model’s own'}.")
            case _:
                raise MarsError(f"There is no command {command}; /help lists them.")
        return None

    def _name(self, **change: Any) -> None:
        named = {**self.named, **change}
        settings = decoding_settings(self.checkpoint.mars, named)
        self.named = named
        self.terminal.note(
            f"{'exact' if settings.exact else 'lossy'}, tau {settings.tau:g}, rule {settings.rule}"
        )

    def _answer(self, message: str) -> None:
        settings = decoding_settings(self.checkpoint.mars, self.named)
        turns = [*self.turns, {"role": "user", "content": message}]
        prompt_ids, dropped = self._fit(turns, settings.max_new_tokens)
        if dropped:
            self.terminal.note(
                f"The context is full: the oldest {plural(dropped, 'turn')} of the conversation "
                f"{'is' if dropped == 1 else 'are'} left out."
            )
        answer = self.terminal.answer(self.checkpoint, self.engine, prompt_ids, settings)
        # A stopped answer is still what was said; one stopped before its first word was never said.
        if answer.text.strip():
            self.turns = [*turns[2 * dropped :], {"role": "assistant", "content": answer.text}]

    def _fit(self, turns: list[dict[str, str]], budget: int) -> tuple[list[int], int]:
        """The prompt's ids, and how many of the oldest turns (a question and its answer) had to go for them.

        Room for the answer is part of what must fit, up to a quarter of the context: a budget as long as the
        context must not empty the conversation.
        """
        from mars_lm.prompts import encode_chat

        room = self.engine.max_length - min(budget, self.engine.max_length // 4)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        dropped = 0
        while True:
            prompt_ids = encode_chat(self.checkpoint, system + turns[2 * dropped :])
            if len(prompt_ids) <= room or 2 * dropped + 1 >= len(turns):
                return prompt_ids, dropped
            dropped += 1


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise MarsError(f"/tau is followed by a number, such as /tau 0.9, not by {value!r}.") from None
