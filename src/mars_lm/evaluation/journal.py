"""Finished answers on disk, a JSON line each, so that an evaluation that was killed goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from mars_lm.decoding import GenerationResult
from mars_lm.settings import DecodingSettings


class Journal:
    """Answers by task, prompt and settings; a line that a kill cut short counts for nothing.

    Sampled answers are not kept: the same request may be asked several times for different ones.

    Args:
        path: the file; made with its folder when there is an answer to keep.
    """

    def __init__(self, path: Path) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                    self._known[row["key"]] = row["result"]
                    self._seconds[row["session"]] = max(
                        self._seconds.get(row["session"], 0.0), row["elapsed"]
                    )
                except (ValueError, KeyError, TypeError):
                    continue
        self._path = path
        self._file: TextIO | None = None
        self._session, self._start = secrets.token_hex(4), time.perf_counter()

    def find(self, task: str, prompt: Sequence[int], settings: DecodingSettings) -> GenerationResult | None:
        """The answer of an earlier run, or None."""
        row = self._known.get(_key(task, prompt, settings))
        return GenerationResult(**row) if row is not None and settings.temperature == 0 else None

    def write(
        self, task: str, prompt: Sequence[int], settings: DecodingSettings, result: GenerationResult
    ) -> None:
        """Keep an answer."""
        if settings.temperature > 0:
            return
        kept = {
            name: getattr(result, name)
            for name in ("token_ids", "finish_reason", "forwards", "accepted_lengths", "rejected_drafts")
        }
        row = {
            "key": _key(task, prompt, settings),
            "task": task,
            "session": self._session,
            "elapsed": time.perf_counter() - self._start,
            "result": kept,
        }
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
            self._file.write("\n")  # ends a line that was cut short
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def earlier_seconds(self) -> float:
        """How long the earlier runs decoded, up to the last answer that each kept."""
        return sum(self._seconds.values())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _key(task: str, prompt: Sequence[int], settings: DecodingSettings) -> str:
    what = json.dumps([task, list(prompt), dataclasses.asdict(settings)])
    return hashlib.sha256(what.encode()).hexdigest()[:32]
