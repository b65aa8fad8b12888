"""Rows of a dataset -> rows that TRL's SFTTrainer prepares: which part is prompt, which is response.

TRL tokenizes, applies the chat template, truncates and packs. What stands here is only what it leaves open:
where a file's rows come from, what a bad row is told, and that the response alone is supervised.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from mars_lm.errors import MarsError

ROLES = ("system", "user", "assistant", "tool")


def _check_row(row: Any, where: str) -> dict[str, Any]:
    """One row, as `prompt` and `completion` (text or messages).

    Raises:
        MarsError: the row has another shape; the sentence starts with `where`.
    """
    if not isinstance(row, dict):
        raise MarsError(f"{where}: expected a JSON object, found {type(row).__name__}.")
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise MarsError(f"{where}: 'messages' is expected to be a list of at least one message.")
        for number, message in enumerate(messages):
            if (
                not isinstance(message, dict)
                or message.get("role") not in ROLES
                or not isinstance(message.get("content"), str)
            ):
                raise MarsError(
                    f"{where}: message {number} is expected to be an object with a role ({', '.join(ROLES)}) and a "
                    "content of text."
                )
        if messages[-1]["role"] != "assistant":
            raise MarsError(
                f"{where}: the last message is expected to be the assistant's, which is trained on."
            )
        turns = [{"role": m["role"], "content": m["content"]} for m in messages]
        return {"prompt": turns[:-1], "completion": turns[-1:]}
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if type(prompt) is not type(completion) or not isinstance(prompt, (str, list)):
            raise MarsError(
                f"{where}: 'prompt' and 'completion' are expected to be both text, or both lists of messages."
            )
        return {"prompt": prompt, "completion": completion}
    raise MarsError(
        f"{where}: expected 'messages' (role and content each), or 'prompt' and 'completion'; found "
        f"{', '.join(sorted(map(str, row))) or 'nothing'}."
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, checked.

    Raises:
        MarsError: the file is missing or empty, or a line is no row; file and line are named.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MarsError(
            f"{path}: the dataset can't be read ({error.strerror}); give a JSONL file or a Hub id."
        ) from None
    except UnicodeDecodeError:
        raise MarsError(f"{path}: the dataset is not UTF-8 text; expected JSON Lines.") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise MarsError(f"{path}, line {number}: not valid JSON ({error.msg}).") from None
        rows.append(_check_row(row, f"{path}, line {number}"))
    if not rows:
        raise MarsError(f"{path}: the dataset has no rows.")
    return rows


def load_examples(sources: str | Sequence[str], *, split: str = "train") -> datasets.Dataset:
    """Load and join datasets of chat rows.

    Args:
        sources: local JSONL files or Hub ids; rows with `messages`, or with `prompt` and `completion`.
        split: the split of a Hub dataset.
    Returns:
        A dataset with columns `prompt` and `completion`, each text or messages.
    Raises:
        MarsError: a source is not there, or a row has the wrong shape (file and line named).
    """
    parts = []
    for source in [sources] if isinstance(sources, str) else list(sources):
        path = Path(source).expanduser()
        if path.suffix in (".jsonl", ".json") or path.exists():
            rows = read_jsonl(path)
        else:
            try:
                hub = datasets.load_dataset(source, split=split)
            except Exception as error:
                raise MarsError(
                    f"dataset {source!r} is neither a local JSONL file nor to be had from the Hub "
                    f"({type(error).__name__}); check the name, the path, and the network."
                ) from None
            rows = [_check_row(row, f"{source}, row {number}") for number, row in enumerate(hub)]
        parts.append(datasets.Dataset.from_list(rows))
    if len({str(part.features) for part in parts}) > 1:
        raise MarsError("The datasets mix rows of text with rows of messages; train on one kind at a time.")
    return datasets.concatenate_datasets(parts)
