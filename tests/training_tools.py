"""Batches as the trainer's collator makes them, from the lengths of prompts and responses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from mars_lm.training.streams import IGNORE, Gaps
from mars_lm.training.trainer import StreamCollator

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
