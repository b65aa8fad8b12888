"""The training benchmark: its naive loop does the trainer's work, and a contestant's death is told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mars_lm import base_weights
from mars_lm import checkpoint as checkpoints
from mars_lm.errors import MarsError
from tiny import tiny_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import train as benchmark

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "user", "asks", "it"]


class Line:
    """A pipe whose other end says go at once."""

    def __init__(self) -> None:
        self.sent: list = []

    def recv(self) -> str:
        return "go"

    def send(self, message) -> None:
        self.sent.append(message)


@pytest.fixture
def rows(tmp_path, monkeypatch) -> Path:
    """Rows of unlike lengths, one of them cut by max_length, for a tiny base model."""
    base = tiny_checkpoint(mars=False)
    checkpoints.save(base.model, base.tokenizer, tmp_path / "base")
    monkeypatch.setattr(base_weights, "find_or_fetch", lambda: tmp_path / "base")
    monkeypatch.setattr(benchmark, "MAX_LENGTH", 48)
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number in range(5):
            turns = (("user", WORDS[: number + 1]), ("assistant", WORDS[number:] * (number + 1)))
            messages = [{"role": role, "content": " ".join(words)} for role, words in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.mark.parametrize(
    "objective", [{"mask_loss": "ce", "phases": 1}, {"mask_loss": "kd", "phases": 2}], ids=["ce", "kd"]
)
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_the_naive_loop_computes_the_trainers_loss(rows, objective, rank):
    ours, naive = Line(), Line()
    changes = {"lora_rank": rank, **objective}
    benchmark.run_trainer(
        benchmark.Turns(ours), rows, 2, {**changes, "precision": "float32", "use_cpu": True}
    )
    benchmark.run_naive(benchmark.Turns(naive), rows, 2, {**changes, "autocast": False})
    assert ours.sent[:-1] == naive.sent[:-1] == ["done", "done"]
    assert ours.sent[-1]["first_loss"] == pytest.approx(naive.sent[-1]["first_loss"], rel=1e-4)
    assert all(facts["peak"] >= facts["libraries"] > 0 for facts in (ours.sent[-1], naive.sent[-1]))


def die(*_) -> None:
    os._exit(3)


def test_a_contestant_that_dies_is_told(tmp_path):
    with pytest.raises(MarsError, match=r"the weak one ended early \(exit code 3"):
        benchmark.compete({"the weak one": (die, {})}, tmp_path / "none.jsonl", 1, 0)


def test_more_rows_than_there_are_is_a_sentence(tmp_path):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "few.jsonl").write_text('{"messages": []}\n')
    args = type("Args", (), {"data": tmp_path, "file": "few.jsonl", "first_row": 0})
    with pytest.raises(MarsError, match=r"few\.jsonl has only 1 rows"), benchmark.rows_of(args, 2):
        pass
