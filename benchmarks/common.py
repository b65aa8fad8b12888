"""What the benchmarks share: prompts from local data, runs in turn, results with their provenance."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table

from mars_lm.checkpoint import Checkpoint, encode_chat
from mars_lm.errors import MarsError
from mars_lm.provenance import provenance
from mars_lm.rows import read_objects

if TYPE_CHECKING:
    from mars_lm.decoding import Engine
    from mars_lm.decoding.engine import GenerationResult
    from mars_lm.settings import DecodingSettings

Name = TypeVar("Name", bound=Hashable)

FIELDS = {"gsm8k": "question", "humaneval": "prompt", "ifeval": "prompt"}


def load_prompts(data: Path, task: str, count: int, seed: int = 0) -> list[str]:
    """`count` prompts of a task's test rows, drawn by the seed; HumanEval's are wrapped as a request."""
    path = data / task / "test.jsonl"
    if not path.is_file():
        raise MarsError(f"{path} is not there: give --data a folder laid out as TASK/test.jsonl.")
    rows = [row for _, row in read_objects(path)]
    picked = random.Random(seed).sample(rows, min(count, len(rows)))
    prompts = [row[FIELDS[task]] for row in picked]
    if task == "humaneval":
        prompts = [
            f"Complete this Python function:\n\n```python\n{prompt.strip()}\n```" for prompt in prompts
        ]
    return prompts


def prompt_ids(checkpoint: Checkpoint, prompts: Sequence[str]) -> list[list[int]]:
    """The prompts as the user's message in the chat template, tokenized."""
    return [encode_chat(checkpoint, [{"role": "user", "content": prompt}]) for prompt in prompts]


def decode(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: DecodingSettings
) -> list[GenerationResult]:
    """The engine's answers, in the prompts' order; as many at once as it has rows."""
    numbers = [engine.add(prompt, settings) for prompt in prompts]
    for _ in engine.stream():
        pass
    return [engine.result(number) for number in numbers]


def totals(results: Sequence[GenerationResult]) -> tuple[int, int]:
    """Tokens and forwards of all answers together; their quotient is tokens per forward (SPEC 3)."""
    return sum(len(result.token_ids) for result in results), sum(result.forwards for result in results)


def parting(first: Sequence[int], other: Sequence[int]) -> int | None:
    """The place at which two answers part (the shorter one's end, if the longer goes on); None: the same."""
    if first == other:
        return None
    pairs = enumerate(zip(first, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(other)))


def gap(logprobs: Iterable[float]) -> float:
    """Between the two best of a place: a difference of log-probabilities is that of the logits."""
    first, second = sorted(logprobs, reverse=True)[:2]
    return float(first - second)


def table(rows: Sequence[dict[str, Any]], title: str | None = None, digits: int = 2) -> Table:
    """Flat rows as a printed table: numbers with so many digits behind the point, nothing as a dash."""
    out = Table(title=title, title_justify="left")
    for name in rows[0] if rows else ():
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(*(_cell(value, digits) for value in row.values()))
    return out


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def in_turn(
    contestants: dict[Name, Callable[[], Any]], repeats: int, warm_up: int = 1
) -> dict[Name, list[float]]:
    """Seconds of each contestant, run A B C, A B C, …: a machine's drift meets all alike."""
    seconds: dict[Name, list[float]] = {name: [] for name in contestants}
    for turn in range(warm_up + repeats):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the ratios turn by turn."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def write(path: Path, result: dict[str, Any], *, seed: int | None = None) -> None:
    """The result and its provenance as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**result, "provenance": provenance(seed=seed)}, indent=2) + "\n")
