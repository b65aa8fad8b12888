"""Rows of a dataset -> rows that TRL's SFTTrainer prepares: which part is prompt, which is response.

TRL tokenizes, applies the chat template, truncates and packs. What stands here is only what it leaves open:
where a file's rows come from, what a bad row is told, and that the response alone is supervised.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from mars_lm.errors import MarsError
from mars_lm.rows import check_messages, read_objects

logger = logging.getLogger(__name__)


def as_example(row: dict[str, Any], where: str, *, every_turn: bool = False) -> dict[str, Any]:
    """One row as `prompt` and `completion` (text or messages), or whole as `messages`.

    Args:
        row: with `messages`, or with `prompt` and `completion`.
        where: the words that name its place.
        every_turn: leave `messages` whole, for a loss on every assistant turn and not on the last alone.
    Raises:
        MarsError: the row has another shape; the sentence starts with `where`.
    """
    if "messages" in row:
        messages = row["messages"]
        check_messages(messages, where)
        turns = [{"role": message["role"], "content": message["content"]} for message in messages]
        if every_turn:
            if all(turn["role"] != "assistant" for turn in turns):
                raise MarsError(f"{where}: no message is the assistant's, which is trained on.")
            return {"messages": turns}
        if turns[-1]["role"] != "assistant":
            raise MarsError(
                f"{where}: the last message is expected to be the assistant's, which is trained on."
            )
        return {"prompt": turns[:-1], "completion": turns[-1:]}
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            check_messages(prompt, f"{where}: prompt")
            check_messages(completion, f"{where}: completion")
        elif not (isinstance(prompt, str) and isinstance(completion, str)):
            raise MarsError(
                f"{where}: 'prompt' and 'completion' are expected to be both text, or both lists of messages."
            )
        return {"prompt": prompt, "completion": completion}
    raise MarsError(
        f"{where}: expected 'messages' (role and content each), or 'prompt' and 'completion'; found "
        f"{', '.join(sorted(map(str, row))) or 'nothing'}."
    )


def has_response(example: dict[str, Any]) -> bool:
    """Whether there is any text in what an example is trained to answer."""
    answer = example.get("completion", example.get("messages"))
    if isinstance(answer, list):
        answer = "".join(turn["content"] for turn in answer if turn["role"] == "assistant")
    return answer is None or bool(answer.strip())


def load_examples(
    sources: str | Sequence[str],
    *,
    split: str = "train",
    every_turn: bool = False,
    skip_bad_rows: bool = False,
) -> datasets.Dataset:
    """Load and join datasets of chat rows.

    Args:
        sources: local JSONL files, folders of a dataset, or Hub ids; rows with `messages`, or with `prompt`
            and `completion`.
        split: the split of a Hub dataset.
        every_turn: leave rows of `messages` whole, see `as_example`.
        skip_bad_rows: leave rows of another shape out, and say how many, instead of refusing the dataset.
    Returns:
        A dataset with columns `prompt` and `completion`, each text or messages (or `messages` alone).
    Raises:
        MarsError: a source is not there or empty, or a row has the wrong shape (file and line named).
    """
    parts = []
    for source in [sources] if isinstance(sources, str) else list(sources):
        path = Path(source).expanduser()
        if path.is_file() or (path.suffix in (".jsonl", ".json") and not path.is_dir()):
            part, dropped = _local(path, every_turn, skip_bad_rows)
        else:
            part, dropped = _hub(source, split, every_turn, skip_bad_rows)
        if dropped:
            logger.warning("%s: %d rows of another shape were left out.", source, dropped)
        if not len(part):
            raise MarsError(f"{source}: the dataset has no rows.")
        parts.append(part)
    if len({tuple(part.column_names) for part in parts}) > 1 or len({str(p.features) for p in parts}) > 1:
        raise MarsError("The datasets mix rows of text with rows of messages; train on one kind at a time.")
    return datasets.concatenate_datasets(parts)


def _local(path: Path, every_turn: bool, skip: bool) -> tuple[datasets.Dataset, int]:
    examples: list[dict[str, Any]] = []
    dropped = 0
    for where, row in read_objects(path):
        try:
            example = as_example(row, where, every_turn=every_turn)
            if examples and _kind(example) != _kind(examples[0]):
                raise MarsError(f"{where}: this row is of another kind (text, or messages) than the first.")
        except MarsError:
            if not skip:
                raise
            dropped += 1
            continue
        examples.append(example)
    return datasets.Dataset.from_list(examples), dropped


def _kind(example: dict[str, Any]) -> tuple[tuple[str, type], ...]:
    return tuple((name, type(value)) for name, value in example.items())


def _hub(source: str, split: str, every_turn: bool, skip: bool) -> tuple[datasets.Dataset, int]:
    try:
        rows = datasets.load_dataset(source, split=split)
    except Exception as error:
        raise MarsError(
            f"dataset {source!r} is neither a local JSONL file nor to be had from the Hub "
            f"({type(error).__name__}); check the name, the path, and the network."
        ) from None
    given = len(rows)
    if skip:
        rows = rows.filter(_is_good, fn_kwargs={"every_turn": every_turn}, desc=f"Checking {source}")
    # Mapped, not listed: millions of rows stay on the disk.
    rows = rows.map(
        lambda row, number: as_example(row, f"{source}, row {number}", every_turn=every_turn),
        with_indices=True,
        remove_columns=rows.column_names,
        desc=f"Reading {source}",
    )
    return rows, given - len(rows)


def _is_good(row: dict[str, Any], every_turn: bool) -> bool:
    try:
        as_example(row, "", every_turn=every_turn)
    except MarsError:
        return False
    return True
