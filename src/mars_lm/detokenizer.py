"""Token ids, as they come -> text that never shows half of a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a decoder puts for bytes that are no whole UTF-8 character (yet).
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes one request's tokens step by step; special tokens are left out.

    A character whose bytes are spread over several tokens is held back until its last byte is there. The
    pieces joined are the text of all tokens decoded at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # The tokens decoded together with the next ones: some tokenizers set a space by what stands before.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._shown = 0  # characters of the pending tokens' text that `push` gave already

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text that these tokens complete; empty while a character is half."""
        if not token_ids:
            return ""
        self._pending.extend(token_ids)
        text = self._pending_text()
        whole = text.rstrip(REPLACEMENT)
        piece = whole[self._shown :]
        if whole == text:
            self._context, self._pending, self._shown = self._pending, [], 0
            self._context_text = self._decode(self._context)
        else:
            self._shown = max(self._shown, len(whole))
        return piece

    def finish(self) -> str:
        """The text held back, as it is: the answer ends here."""
        piece = self._pending_text()[self._shown :]
        self._context, self._pending, self._shown, self._context_text = [], [], 0, ""
        return piece

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._context_text) :]

    def _decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids)


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of an answer's tokens, special tokens left out."""
    return str(
        tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
