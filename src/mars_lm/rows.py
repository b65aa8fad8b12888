"""JSON Lines of prompts and messages: who reads them is told of a bad row by file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mars_lm.errors import MarsError

ROLES = ("system", "user", "assistant", "tool")


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON Lines file, each with the words that name its place (`FILE, line N`).

    Args:
        path: the file; `-` is stdin. Empty lines are skipped.
    Raises:
        MarsError: the file can't be read, or a line is no JSON object.
    """
    if str(path) == "-":
        yield from _objects(sys.stdin.buffer, "stdin")
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise MarsError(f"{path} can't be read ({error.strerror}).") from None
    with file:
        yield from _objects(file, str(path))


def _objects(lines: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        # Lines of bytes: a text's splitlines would also split at U+2028, which JSON allows inside a string.
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{name}, line {number}"
                yield where, parse_object(line, where)
    except OSError as error:
        raise MarsError(f"{name} can't be read ({error.strerror}).") from None


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """One line as a JSON object.

    Raises:
        MarsError: it is not UTF-8, not JSON, or no object; the sentence starts with `where`.
    """
    try:
        value = json.loads(line.decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a surrogate pair parses, but is no text
    except UnicodeError:
        raise MarsError(f"{where}: not valid UTF-8 text.") from None
    except json.JSONDecodeError as error:
        raise MarsError(f"{where}: not valid JSON ({error.msg}).") from None
    except RecursionError:
        raise MarsError(f"{where}: nested too deeply.") from None
    if not isinstance(value, dict):
        raise MarsError(f"{where}: expected a JSON object, found {type(value).__name__}.")
    return value


def check_messages(messages: Any, where: str) -> None:
    """Refuse what is no list of at least one message with a known role and a text.

    Raises:
        MarsError: the sentence starts with `where`.
    """
    if not isinstance(messages, list) or not messages:
        raise MarsError(f"{where}: 'messages' is expected to be a list of at least one message.")
    for position, message in enumerate(messages, start=1):
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise MarsError(
                f"{where}: message {position} is expected to be an object with a 'role' ({', '.join(ROLES)}) "
                "and a 'content' of text."
            )
