"""A text file -> token ids, and from where on they are predicted."""

from __future__ import annotations

from pathlib import Path

from mars_lm.checkpoint import Checkpoint, encode_chat, encode_prompt
from mars_lm.errors import MarsError
from mars_lm.rows import check_messages, read_objects

Example = tuple[list[int], int]


def read_examples(
    checkpoint: Checkpoint, path: Path, *, length: int = 256, limit: int | None = None
) -> list[Example]:
    """Ids of at most `length` tokens, each with the place of its first predicted token (1 or more).

    Args:
        checkpoint: tokenizer and chat template.
        path: `.jsonl` with `messages` (the last is the response), `prompt` and `completion`, or `text`; any
            other file is one plain text, cut into pieces of `length` tokens.
        length: longer rows are cut.
        limit: the most rows.
    Raises:
        MarsError: the file can't be read, or has no row with anything to predict.
    """
    if path.suffix == ".jsonl":
        examples = _rows(checkpoint, path, length, limit)
    else:
        examples = _pieces(checkpoint, path, length)
    examples = [(ids, start) for ids, start in examples if len(ids) > start][:limit]
    if not examples:
        raise MarsError(f"{path} has no row with a response of at least one token within {length} tokens.")
    return examples


def read_prompts(checkpoint: Checkpoint, path: Path, *, limit: int | None = None) -> list[list[int]]:
    """The prompts of a JSON Lines file, without answers: rows with `prompt`, or `messages`.

    Messages that end with an answer are cut before it. A model without a chat template continues `prompt` as
    it stands.

    Raises:
        MarsError: the file can't be read, a row has another shape, or there is none.
    """
    prompts: list[list[int]] = []
    for where, row in read_objects(path):
        if limit is not None and len(prompts) >= limit:
            break
        messages = row.get("messages")
        if messages is None and isinstance(row.get("prompt"), str):
            if not checkpoint.tokenizer.chat_template:
                prompts.append(encode_prompt(checkpoint, row["prompt"]))
                continue
            messages = [{"role": "user", "content": row["prompt"]}]
        if messages is None:
            raise MarsError(f"{where}: expected 'prompt' (text) or 'messages'.")
        check_messages(messages, where)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        prompts.append(encode_chat(checkpoint, messages))
    if not prompts:
        raise MarsError(f"{path} has no prompts.")
    return prompts


def _pieces(checkpoint: Checkpoint, path: Path, length: int) -> list[Example]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MarsError(f"{path} can't be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise MarsError(f"{path} is not UTF-8 text.") from None
    if not text.strip():
        raise MarsError(f"{path} is empty.")
    ids = encode_prompt(checkpoint, text)
    return [(ids[at : at + length], 1) for at in range(0, len(ids), length)]


def _rows(checkpoint: Checkpoint, path: Path, length: int, limit: int | None) -> list[Example]:
    examples: list[Example] = []
    for where, row in read_objects(path):
        if limit is not None and len(examples) >= limit:
            break
        if "messages" in row:
            check_messages(row["messages"], where)
            prompt = encode_chat(checkpoint, row["messages"][:-1])
            whole = encode_chat(checkpoint, row["messages"], add_generation_prompt=False)
            start = len(prompt)
            if whole[:start] != prompt:
                raise MarsError(
                    f"{where}: the chat template writes the prompt differently before a response."
                )
        elif isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
            prompt = encode_prompt(checkpoint, row["prompt"])
            whole, start = encode_prompt(checkpoint, row["prompt"] + row["completion"]), len(prompt)
        elif isinstance(row.get("text"), str):
            whole, start = encode_prompt(checkpoint, row["text"]), 1
        else:
            raise MarsError(f"{where}: expected 'messages', 'prompt' and 'completion', or 'text'.")
        examples.append((whole[:length], start))
    return examples
