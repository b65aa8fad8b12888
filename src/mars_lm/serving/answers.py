"""What the engine gave -> the objects that OpenAI's clients parse."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mars_lm

if TYPE_CHECKING:
    from mars_lm.decoding import GenerationResult
    from mars_lm.serving.runner import Piece

FINGERPRINT = f"mars-lm-{mars_lm.__version__}"
LEAST_LOGPROB = -9999.0  # OpenAI's own way to write minus infinity, which JSON has not


def mars_numbers(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """MARS's numbers over one or several answers."""
    tokens = sum(len(result.token_ids) for result in results)
    forwards = sum(result.forwards for result in results)
    return {
        "forwards": forwards,
        "tokens_per_forward": round(tokens / forwards, 4) if forwards else 0.0,
        "accepted_lengths": [length for result in results for length in result.accepted_lengths],
        "rejected_drafts": sum(result.rejected_drafts for result in results),
    }


class Answer:
    """Builds one request's answer, whole or in chunks.

    Args:
        model: the name that the client knows.
        tokenizer: for the texts of log-probabilities.
        prompt_tokens: of all prompts.
        choices: how many answers.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, tokenizer: Any, prompt_tokens: int, choices: int) -> None:
        self.tokenizer, self.prompt_tokens = tokenizer, prompt_tokens
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self.results: list[GenerationResult | None] = [None] * choices
        self._texts = [""] * choices
        self._entries: list[list[Any]] = [[] for _ in range(choices)]
        self._offsets = [0] * choices

    def take(self, piece: Piece) -> None:
        """Keep a piece for the whole answer."""
        self._texts[piece.index] += piece.output.text
        self._entries[piece.index] += piece.output.logprobs or ()
        self.results[piece.index] = piece.result or self.results[piece.index]

    def whole(self, *, logprobs: bool) -> dict[str, Any]:
        """The answer, once every piece is taken."""
        choices = []
        for index, result in enumerate(self.results):
            assert result is not None
            said = self._logprobs(index, self._entries[index]) if logprobs else None
            choices.append(
                {
                    "index": index,
                    **self._content(self._texts[index]),
                    "logprobs": said,
                    "finish_reason": result.finish_reason,
                    "mars": mars_numbers([result]),
                }
            )
        return {
            **self.head,
            "object": self.whole_object,
            "choices": choices,
            "usage": self.usage(),
            "mars": mars_numbers(self._finished()),
        }

    def opening(self) -> list[dict[str, Any]]:
        """Choices to send before the first token."""
        return []

    def chunk(self, piece: Piece, *, logprobs: bool) -> dict[str, Any]:
        """All the tokens of one forward."""
        self.results[piece.index] = piece.result or self.results[piece.index]
        said = self._logprobs(piece.index, piece.output.logprobs or ()) if logprobs else None
        choice = {
            "index": piece.index,
            **self._piece(piece.output.text),
            "logprobs": said,
            "finish_reason": piece.output.finish_reason,
        }
        mars: dict[str, Any] = {"tokens": len(piece.output.new_token_ids)}
        if piece.result is not None:
            mars |= mars_numbers([piece.result])
        return {**self.frame([choice]), "mars": mars}

    def frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk around choices."""
        return {**self.head, "object": self.chunk_object, "choices": choices}

    def usage(self) -> dict[str, int]:
        tokens = sum(len(result.token_ids) for result in self._finished())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        }

    def numbers(self) -> dict[str, Any]:
        """MARS's numbers over all choices that have ended."""
        return mars_numbers(self._finished())

    def _finished(self) -> list[GenerationResult]:
        return [result for result in self.results if result is not None]

    def _content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, index: int, entries: Sequence[Any]) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            | {"finish_reason": None}
            for index in range(len(self.results))
        ]

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _logprobs(self, index: int, entries: Sequence[Any]) -> dict[str, Any]:
        return {"content": [self._token(entry) for entry in entries], "refusal": None}

    def _token(self, entry: Any) -> dict[str, Any]:
        top = [self._said(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._said(entry.token_id, entry.logprob), "top_logprobs": top}

    def _said(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self.tokenizer, token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(data),
        }


class CompletionAnswer(Answer):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _piece = _content

    def _logprobs(self, index: int, entries: Sequence[Any]) -> dict[str, Any]:
        texts = [token_text(self.tokenizer, entry.token_id) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        top: list[dict[str, float]] = []
        for entry in entries:
            best: dict[str, float] = {}
            for token_id, logprob in entry.top:  # two tokens may read alike: the likelier one stays
                best.setdefault(token_text(self.tokenizer, token_id), max(logprob, LEAST_LOGPROB))
            top.append(best)
        return {
            "tokens": texts,
            "token_logprobs": [max(entry.logprob, LEAST_LOGPROB) for entry in entries],
            "top_logprobs": top if any(entry.top for entry in entries) else None,
            "text_offset": offsets,
        }


def token_text(tokenizer: Any, token_id: int) -> str:
    """A token as text; bytes that are no whole character show as U+FFFD."""
    return token_bytes(tokenizer, token_id).decode("utf-8", "replace")


@functools.lru_cache(maxsize=2**16)
def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes that a token stands for, special tokens by their names."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token is None:  # an embedding row that the tokenizer does not use
        return b""
    if token_id in tokenizer.all_special_ids:
        return str(token).encode()
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in token):
        # "Ġ" for a space is a byte-level tokenizer's; in another one, such letters are themselves.
        data = bytes(alphabet[character] for character in token)
        if "Ġ" in token or tokenizer.decode([token_id]) == data.decode("utf-8", "replace"):
            return data
    if len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    if "▁" in token:
        return str(token).replace("▁", " ").encode()
    return str(tokenizer.decode([token_id])).encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for the 256 bytes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return table
