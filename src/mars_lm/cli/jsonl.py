"""Many prompts in, many answers out: JSON Lines that a killed run picks up again."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import IO, Any

from mars_lm.errors import MarsError
from mars_lm.rows import check_messages, read_objects

ANSWER_FIELDS = ("text", "token_ids", "finish_reason", "forwards", "accepted_lengths")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the input.

    Args:
        where: its file and line, in words.
        fields: the row as it was read; the answer's row repeats them.
        prompt: a text, or messages with `role` and `content`.
    """

    where: str
    fields: dict[str, Any]
    prompt: str | list[dict[str, str]]


def read_rows(path: Path) -> list[Row]:
    """All rows of a file (`-` is stdin), checked before anything is generated.

    Raises:
        MarsError: the file can't be read, or a row has the wrong shape; file and line are named.
    """
    rows = [_row(where, fields) for where, fields in read_objects(path)]
    if not rows:
        raise MarsError(f"{path} has no rows: expected JSON objects with 'prompt' or 'messages', one a line.")
    return rows


def _row(where: str, fields: dict[str, Any]) -> Row:
    present = [name for name in ("prompt", "messages") if name in fields]
    if len(present) != 1:
        found = " and ".join(present) if present else ", ".join(fields) or "an empty object"
        raise MarsError(f"{where}: expected either 'prompt' or 'messages', found {found}.")
    taken = [name for name in ANSWER_FIELDS if name in fields]
    if taken:
        raise MarsError(f"{where}: it has a field '{taken[0]}', which the answer would overwrite; rename it.")
    prompt = fields[present[0]]
    if present == ["messages"]:
        check_messages(prompt, where)
        if prompt[-1]["role"] == "assistant":
            raise MarsError(f"{where}: the last message is the assistant's already; expected one to answer.")
    elif not isinstance(prompt, str) or not prompt.strip():
        raise MarsError(f"{where}: 'prompt' is expected to be a text that is not empty.")
    return Row(where, fields, prompt)


class AnswerFile:
    """The output, one row an answer, in the input's order; with no path, stdout.

    A file that is there already is continued: its rows answer the first rows of the input. A last line that a
    killed run left unfinished is cut off.

    Args:
        path: the file; None is stdout.
        rows: the input.
    Raises:
        MarsError: the file can't be written, or holds something else than answers to this input's first rows.
    """

    def __init__(self, path: Path | None, rows: list[Row]) -> None:
        self.name = "stdout" if path is None else str(path)
        self.done = 0
        try:
            # A pipe or a device has nothing to continue.
            if path is not None and path.is_file():
                self.done = _continue(path, rows)
            self._file: IO[bytes] = sys.stdout.buffer if path is None else path.open("ab")
        except OSError as error:
            raise MarsError(f"{self.name} can't be written ({error.strerror}).") from None

    def write(self, row: Row, answer: dict[str, Any]) -> None:
        """Append one row and hand it to the operating system.

        Raises:
            MarsError: it doesn't fit on the disk; the rows before it stay.
        """
        line = _opening(row) + b", " + json.dumps(answer, ensure_ascii=False).encode("utf-8")[1:] + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except BrokenPipeError:  # who reads stdout has had enough, which is no mistake
            raise
        except OSError as error:
            raise MarsError(
                f"{self.name} can't be written ({error.strerror}); {self.done} rows are in it, and the same "
                "command continues behind them."
            ) from None
        self.done += 1


def _opening(row: Row) -> bytes:
    """How the answer's line begins: with all that the row holds."""
    return json.dumps(row.fields, ensure_ascii=False).encode("utf-8")[:-1]


def _continue(path: Path, rows: list[Row]) -> int:
    """Cut off a half-written last line; how many of the input's rows the file answers."""
    done = complete = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            opening = _opening(rows[done]) if done < len(rows) else b"\n"
            finished = line.endswith(b"\n")
            # Half a line is cut off only if it is half of ours: the path may be a slip of the pen.
            if not line.startswith(opening) and (finished or not opening.startswith(line)):
                raise MarsError(
                    f"{path}, line {number}: not an answer to row {done + 1} of this input; give another "
                    "--output, or move this file away."
                )
            if finished:
                done += 1
                complete += len(line)
    if complete < path.stat().st_size:
        os.truncate(path, complete)
    return done
