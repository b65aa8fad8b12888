"""Batches as the trainer's collator makes them, tiny training runs, and processes that can be killed."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import peft
import torch

from mars_lm.training.streams import IGNORE, Gaps
from mars_lm.training.trainer import MarsConfig, MarsTrainer, StreamCollator
from tiny import tiny_checkpoint

MASK = 63  # of a vocabulary of 64 words
PAD = 0
BLOCK_DIFFUSION = Gaps(masking="random", attention="bidirectional", alignment="same")


@dataclasses.dataclass
class Example:
    """A prompt and its response, or several in turn: `parts` are lengths, prompt first."""

    ids: list[int]
    labels: list[int]

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> list[int]:
        """The positions that are to be predicted."""
        return [at for at, label in enumerate(self.labels) if label != IGNORE]


def example(seed: int, *parts: int, words: int = 60) -> Example:
    """A random example of len(parts) turns: prompt, response, prompt, response, …"""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(1, words, (sum(parts),), generator=generator).tolist()
    labels: list[int] = []
    for number, length in enumerate(parts):
        turn = ids[len(labels) : len(labels) + length]
        labels += turn if number % 2 else [IGNORE] * length
    return Example(ids, labels)


def row(*examples: Example) -> dict[str, Any]:
    """Examples packed into one row, as TRL packs them."""
    return {
        "input_ids": [token for item in examples for token in item.ids],
        "labels": [label for item in examples for label in item.labels],
        "seq_lengths": [item.length for item in examples],
    }


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return StreamCollator(pad_token_id=PAD, mask_token_id=MASK)(list(rows))


def pretokenized(*rows: dict[str, Any]) -> datasets.Dataset:
    """A dataset of examples that are token ids already, one example a row."""
    return datasets.Dataset.from_list([{name: r[name] for name in ("input_ids", "labels")} for r in rows])


def config_for(folder: Path, **values: Any) -> MarsConfig:
    """One step of plain gradient descent: afterwards the weights have moved by the gradient."""
    return MarsConfig(
        **{
            "output_dir": str(folder),
            "max_steps": 1,
            "per_device_train_batch_size": 8,
            "optim": "sgd",
            "learning_rate": 1.0,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "activation_checkpointing": False,
            **values,
        }
    )


def trainer_for(
    folder: Path, rows: datasets.Dataset, *, lora: bool = False, tied: bool = True, **values: Any
) -> MarsTrainer:
    """A trainer of a tiny model, the same for every call."""
    options = {
        name: values.pop(name) for name in ("eval_dataset", "provenance", "attention") if name in values
    }
    checkpoint = tiny_checkpoint(tied=tied)
    assert checkpoint.mars is not None
    adapter = None
    if lora:
        adapter = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules="all-linear",
            trainable_token_indices=[checkpoint.mars.mask_token_id],
            task_type="CAUSAL_LM",
        )
    return MarsTrainer(
        model=checkpoint.model,
        args=config_for(folder, **values),
        mars=checkpoint.mars,
        train_dataset=rows,
        processing_class=checkpoint.tokenizer,
        peft_config=adapter,
        **options,
    )


def step_of(trainer: MarsTrainer) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Train; return how far each trained parameter moved, and the first step's log."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    moved = dict(trainer.model.named_parameters())
    return {name: moved[name].detach() - start for name, start in before.items()}, trainer.state.log_history[
        0
    ]


_CONTEXT = multiprocessing.get_context("forkserver")


def start_child(target: Callable[..., None], *arguments: Any) -> Any:
    """Run a function in a process of its own, forked from one that has imported the trainer already."""
    _CONTEXT.set_forkserver_preload(["training_tools"])
    child = _CONTEXT.Process(target=_as_child, args=(target, arguments))
    child.start()
    return child


def _as_child(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    target(*arguments)


def exit_code(child: Any, seconds: float = 300) -> int | None:
    """Wait for a child; negative numbers are the signals that killed it."""
    child.join(seconds)
    if child.is_alive():
        child.kill()
        raise AssertionError(f"the child did not end in {seconds} seconds")
    code: int | None = child.exitcode
    return code


def join_ranks(rank: int, ranks: int, port: int) -> None:
    """Make this process one of several, as torchrun does."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
