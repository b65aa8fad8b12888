"""`mars demo`: the same prompts one and several tokens at a time, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from mars_lm.cli import options
from mars_lm.cli.terminal import Answer, Terminal
from mars_lm.settings import DecodingSettings, decoding_settings

if TYPE_CHECKING:
    from rich.table import Table

    from mars_lm.decoding import Engine

PROMPTS = {
    "maths": "A baker makes 12 trays of 8 rolls. She sells 70 rolls in the morning and half of the rest in "
    "the afternoon. How many rolls are left?",
    "maths 2": "Tom reads 15 pages a day from Monday to Friday and 30 pages on Saturday. How many pages does "
    "he read in four such weeks?",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and a loop.",
    "chat": "You are a lighthouse keeper on a stormy night. Describe what you see and hear.",
}


@dataclasses.dataclass
class Pair:
    """One prompt's two answers."""

    name: str
    one_token: Answer
    exact: Answer


def demo(
    model: options.Model = None,
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    max_new_tokens: options.MaxNewTokens = 160,
    no_color: options.NoColor = False,
) -> None:
    """Answer a few built-in prompts in one-token mode and in exact mode, and compare.

    The two runs of a prompt follow each other, so that whatever else the machine does meets both.
    """
    terminal = Terminal(no_color=no_color)
    named = options.asked(max_new_tokens=max_new_tokens)
    checkpoint = options.load_checkpoint(model, adapter, dtype, terminal=terminal)
    exact = decoding_settings(checkpoint.mars, {**named, "exact": True})
    one_token = dataclasses.replace(exact, rule="probability", tau=1.0)

    import torch

    from mars_lm.decoding import Engine
    from mars_lm.prompts import encode_chat

    weights = next(checkpoint.model.parameters())
    threads = torch.get_num_threads()
    terminal.remark(f"{checkpoint.dtype} on {weights.device}, {threads} threads; one colour a forward")
    engine = Engine(checkpoint, max_rows=1)
    prompts = {
        name: encode_chat(checkpoint, [{"role": "user", "content": prompt}])
        for name, prompt in PROMPTS.items()
    }
    _warm_up(engine, prompts["chat"], [one_token, exact])
    pairs = []
    for name, prompt_ids in prompts.items():
        terminal.heading(f"\n{name}: {PROMPTS[name]}")
        answers = []
        for title, settings in (("one token per forward", one_token), ("exact mode", exact)):
            terminal.heading(f"\n{title}")
            answers.append(terminal.answer(checkpoint, engine, prompt_ids, settings))
            if answers[-1].interrupted:
                raise typer.Exit(130)
        pairs.append(Pair(name, *answers))
    print()
    terminal.console().print(_table(pairs))
    if weights.dtype != torch.float32 and any(pair.one_token.text != pair.exact.text for pair in pairs):
        terminal.remark(
            "Texts part where two words are as good as tied and this number format rounds them either way; "
            "--dtype float32 gives the same text."
        )


def _warm_up(engine: Engine, prompt_ids: list[int], kinds: list[DecodingSettings]) -> None:
    """The first forwards pay for memory and kernels that the later ones find ready."""
    for settings in kinds:
        engine.add(prompt_ids, dataclasses.replace(settings, max_new_tokens=8))
        for _ in engine.stream():
            pass


def _table(pairs: list[Pair]) -> Table:
    from rich.table import Table

    table = Table(title="one-token mode → exact mode", title_justify="left", title_style="bold")
    table.add_column("prompt")
    for header in ("tokens", "tokens per forward", "tokens per second", "speed-up", "same text"):
        table.add_column(header, justify="right")
    for pair in pairs:
        table.add_row(pair.name, *_cells([pair]))
    table.add_section()
    table.add_row("all", *_cells(pairs), style="bold")
    return table


def _cells(pairs: list[Pair]) -> list[str]:
    one, exact = ([getattr(pair, side) for pair in pairs] for side in ("one_token", "exact"))
    per_forward = [_ratio(answers, lambda answer: answer.result.forwards) for answers in (one, exact)]
    per_second = [_ratio(answers, lambda answer: answer.seconds) for answers in (one, exact)]
    same = sum(pair.one_token.text == pair.exact.text for pair in pairs)
    return [
        str(sum(answer.tokens for answer in exact)),
        f"{per_forward[0]:.2f} → {per_forward[1]:.2f}",
        f"{per_second[0]:.1f} → {per_second[1]:.1f}",
        f"{per_second[1] / per_second[0]:.2f}x",
        ("yes" if same else "no") if len(pairs) == 1 else f"{same} of {len(pairs)}",
    ]


def _ratio(answers: list[Answer], divisor: Callable[[Answer], float]) -> float:
    return sum(answer.tokens for answer in answers) / max(sum(divisor(answer) for answer in answers), 1e-9)
