"""A request's tokens, as they come -> text that is safe to show, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mars_lm.detokenizer import Detokenizer


class TextStream:
    """Holds back half a character, and what may be the beginning of a stop string.

    Args:
        tokenizer: the checkpoint's.
        stop: texts that end the answer; never shown, nor a part of one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._pieces = Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._held = ""  # decoded and not shown: at most a stop string's beginning

    def push(self, token_ids: Sequence[int], *, can_stop_from: int = 0) -> tuple[str, int | None]:
        """Take new tokens.

        Args:
            can_stop_from: how many of them come before one that may complete a stop string.
        Returns:
            The text to show; and, if a stop string is complete, how many of the tokens it took.
        """
        if not self._stop:
            return self._pieces.push(token_ids), None
        shown = ""
        for number, token in enumerate(token_ids, 1):
            old = len(self._held)
            text = self._held + self._pieces.push([token])
            begin = self._found(text, old) if number > can_stop_from else None
            if begin is not None:
                self._held = ""
                return shown + text[:begin], number
            keep = self._beginning(text)
            shown, self._held = shown + text[: len(text) - keep], text[len(text) - keep :]
        return shown, None

    def finish(self) -> str:
        """The text held back: the answer ended for another reason."""
        held, self._held = self._held, ""
        return held + self._pieces.finish()

    def _found(self, text: str, old: int) -> int | None:
        """Where the first stop string begins that ends behind the first `old` characters."""
        places = (text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stop)
        return min((place for place in places if place >= 0), default=None)

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max(len(stop) for stop in self._stop) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
