"""`mars generate`: one prompt to the terminal, or a file of prompts to a file of answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mars_lm.cli import options
from mars_lm.cli.jsonl import AnswerFile, Row, read_rows
from mars_lm.cli.terminal import Terminal, interruption, plural, rows_progress
from mars_lm.errors import MarsError
from mars_lm.settings import decoding_settings

if TYPE_CHECKING:
    from mars_lm.checkpoint import Checkpoint

INTERRUPTED = 130  # what a shell gives for a command that Ctrl-C ended


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it, or with -, it is read from stdin.")
    ] = None,
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
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands, without the chat template.")
    ] = False,
    input: Annotated[
        Path | None,
        typer.Option(
            metavar="IN.jsonl",
            help="Many prompts: rows with 'prompt' or 'messages' (- is stdin).",
            rich_help_panel="Many prompts",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.jsonl",
            help="Their answers, in order; a file that is there is continued. Without it: stdout.",
            rich_help_panel="Many prompts",
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="How many prompts at a time.", rich_help_panel="Many prompts"),
    ] = 16,
    no_color: options.NoColor = False,
) -> None:
    """Answer a prompt, or a file of prompts, several tokens per forward pass.

    In a terminal, tokens that came in one forward share a colour. In a pipe, stdout is the text alone.
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
    if input is None and output is not None:
        raise MarsError("--output is for the answers to an --input: give that too, or redirect stdout.")
    if raw and system is not None:
        raise MarsError("--system is part of the chat template, which --raw leaves out: give one of the two.")
    if input is not None:
        if prompt is not None:
            raise MarsError("A PROMPT and --input are both there: give one of the two.")
        rows, answers = _open(input, output, raw=raw)
        if answers.done == len(rows):
            terminal.note(f"{answers.name} has the answers to all {plural(len(rows), 'row')} already.")
            return
        checkpoint = options.load_checkpoint(model, adapter, dtype, terminal=terminal)
        _many(
            checkpoint, rows, answers, named, batch_size=batch_size, system=system, raw=raw, terminal=terminal
        )
        return

    text = _read_prompt(prompt)
    checkpoint = options.load_checkpoint(model, adapter, dtype, terminal=terminal)
    from mars_lm.decoding import Engine

    settings = decoding_settings(checkpoint.mars, named)
    prompt_ids = encode(checkpoint, text, system=system, raw=raw)
    # The cache as long as this request can get, not as long as the model's context.
    engine = Engine(checkpoint, max_rows=1, max_length=len(prompt_ids) + settings.max_new_tokens)
    answer = terminal.answer(checkpoint, engine, prompt_ids, settings)
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


def encode(
    checkpoint: Checkpoint, prompt: str | list[dict[str, str]], *, system: str | None, raw: bool = False
) -> list[int]:
    """A prompt's token ids: in the chat template, or as it stands.

    Raises:
        MarsError: the tokenizer has no chat template, or refuses the messages.
    """
    from mars_lm.prompts import encode_chat, encode_prompt

    if raw:
        return encode_prompt(checkpoint, str(prompt))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return encode_chat(checkpoint, messages)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise MarsError('No prompt: give one (mars generate "…"), or pipe it in.')
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError:
            raise MarsError("The prompt on stdin is not UTF-8 text.") from None
        # `echo` ends its line; that line end is the shell's, not the prompt's.
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise MarsError("The prompt is not UTF-8 text.") from None
    if not prompt.strip():
        raise MarsError("The prompt is empty: give at least one word.")
    return prompt


def _open(input: Path, output: Path | None, *, raw: bool) -> tuple[list[Row], AnswerFile]:
    if output is not None and output.exists() and input.exists() and output.samefile(input):
        raise MarsError(f"--input and --output are both {input}: give the answers a file of their own.")
    rows = read_rows(input)
    for row in rows:
        if raw and not isinstance(row.prompt, str):
            raise MarsError(f"{row.where}: 'messages' need the chat template, which --raw leaves out.")
    return rows, AnswerFile(output, rows)


@contextlib.contextmanager
def _placed(row: Row) -> Iterator[None]:
    """Name the row that a mistake is in."""
    try:
        yield
    except MarsError as error:
        raise MarsError(f"{row.where}: {error}") from None


def _many(
    checkpoint: Checkpoint,
    rows: list[Row],
    answers: AnswerFile,
    named: dict[str, Any],
    *,
    batch_size: int,
    system: str | None,
    raw: bool,
    terminal: Terminal,
) -> None:
    from mars_lm.decoding import Engine
    from mars_lm.detokenizer import decode

    settings = decoding_settings(checkpoint.mars, named)
    todo = rows[answers.done :]
    prompts = []
    for row in todo:
        with _placed(row):
            prompts.append(encode(checkpoint, row.prompt, system=system, raw=raw))
    engine = Engine(
        checkpoint,
        max_rows=min(batch_size, len(todo)),
        max_length=max(map(len, prompts)) + settings.max_new_tokens,
    )
    waiting: dict[int, Row] = {}
    for row, prompt_ids in zip(todo, prompts, strict=True):
        with _placed(row):
            waiting[engine.add(prompt_ids, settings)] = row

    finished: dict[int, dict[str, Any]] = {}
    with rows_progress(total=len(rows), done=answers.done) as progress, interruption() as interrupted:
        for output in engine.stream():
            if output.finish_reason is not None:
                result = engine.result(output.request_id)
                if result.error:
                    terminal.note(f"{waiting[output.request_id].where}: {result.error}")
                progress.count(len(result.token_ids), result.forwards)
                finished[output.request_id] = {
                    "text": decode(checkpoint.tokenizer, result.token_ids),
                    "token_ids": list(result.token_ids),
                    "finish_reason": result.finish_reason,
                    "forwards": result.forwards,
                    "accepted_lengths": list(result.accepted_lengths),
                }
            # In the input's order: an answer that is early waits for those before it.
            while waiting and (request := next(iter(waiting))) in finished:
                answers.write(waiting.pop(request), finished.pop(request))
                progress.advance()
            if interrupted:
                break
    terminal.note(progress.closing_line())
    if interrupted and waiting:
        done = f"{answers.done} of {plural(len(rows), 'row')}"
        terminal.note(f"Stopped: {answers.name} has {done}; the same command continues.")
        raise typer.Exit(INTERRUPTED)
