"""Text into token ids, and which ids end a text: the one place where prompts become ids."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mars_lm.errors import MarsError

# Private-use characters: no tokenizer has tokens of them, no template changes them, no text holds this run.
_OPEN, _CLOSE = "\ue0f1\ue0f2", "\ue0f3\ue0f4"


def encode_chat(
    source: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> list[int]:
    """Render messages with the chat template and tokenize them.

    The ids are exactly those of `tokenizer.apply_chat_template`, but for one thing: a special token's name
    inside a message's content ("what does <|mask|> do?") is plain text, and can never become that token.

    Args:
        source: a `Checkpoint` or a tokenizer.
        messages: objects with `role` and `content` (text).
        add_generation_prompt: end with the opening of the assistant's answer.
    Returns:
        The token ids.
    Raises:
        MarsError: no chat template, or messages that it does not take.
    """
    tokenizer = _tokenizer(source)
    _check_messages(messages)
    names = _special_names(tokenizer)
    contents = [message["content"] for message in messages]
    hidden = [_hide(content, names) for content in contents]
    text = _render(
        tokenizer, [{**m, "content": h} for m, h in zip(messages, hidden, strict=True)], add_generation_prompt
    )
    return _encode(tokenizer, text, names, add_special_tokens=False)


def encode_prompt(source: Any, text: str) -> list[int]:
    """Tokenize a plain text to be continued, without a chat template.

    Special tokens that the tokenizer puts around a text (such as a beginning-of-text token) are kept; their
    names inside the text are plain text. A closing end token is dropped: the text is to be continued.

    Args:
        source: a `Checkpoint` or a tokenizer.
        text: the prompt.
    Returns:
        The token ids, at least one.
    Raises:
        MarsError: no text and no beginning-of-text token: there is nothing to continue.
    """
    tokenizer = _tokenizer(source)
    names = _special_names(tokenizer)
    ids = _encode(tokenizer, _hide(text, names), names, add_special_tokens=True)
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    if not ids:
        raise MarsError("The prompt is empty: give at least one character to continue.")
    return ids


def end_token_ids(checkpoint: Any) -> frozenset[int]:
    """The ids that end a text (SPEC 3): generation config, config, tokenizer, and chat template together.

    Args:
        checkpoint: a `Checkpoint`.
    Returns:
        The ids; empty (with a warning) if nothing names one, and then only the budget ends a text.
    """
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    ends: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        ends.update(as_ids(getattr(holder, "eos_token_id", None)))
    end_of_turn = _end_of_turn(tokenizer)
    if end_of_turn is not None:
        ends.add(end_of_turn)
    if checkpoint.mars is not None:
        ends.discard(checkpoint.mars.mask_token_id)
    if not ends:
        warnings.warn(
            "Neither the model nor its tokenizer nor its chat template names an end-of-sequence token: "
            "texts end only when the token budget is used up.",
            stacklevel=2,
        )
    return frozenset(ends)


def as_ids(value: Any) -> Iterable[int]:
    """The ids in a field of a config that holds one, several, or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _tokenizer(source: Any) -> Any:
    return getattr(source, "tokenizer", source)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise MarsError("There are no messages: give at least one with a role and a content.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise MarsError(f"Message {number} has no role: expected an object with 'role' and 'content'.")
        if not isinstance(message.get("content"), str):
            raise MarsError(
                f"Message {number}'s content is {type(message.get('content')).__name__}, expected text."
            )


def _render(tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise MarsError(
            "The tokenizer has no chat template, so messages cannot be put to this model: use an "
            "instruction-tuned model, put a chat_template.jinja beside its tokenizer, or give a plain prompt."
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except Exception as error:  # templates raise what they like: jinja errors, their own, type errors
        raise MarsError(f"The chat template does not take these messages: {error}.") from error


def _special_names(tokenizer: Any) -> dict[str, int]:
    """Every special token's text and id, longest first, so that no name hides a part of a longer one."""
    decoder = getattr(tokenizer, "added_tokens_decoder", {})
    names = {str(token.content): token_id for token_id, token in decoder.items() if token.special}
    for name in tokenizer.all_special_tokens:
        names.setdefault(str(name), tokenizer.convert_tokens_to_ids(str(name)))
    return {name: names[name] for name in sorted(names, key=len, reverse=True) if name}


def _hide(text: str, names: Mapping[str, int]) -> str:
    """Replace special tokens' names in a user's text by stand-ins that no tokenizer and no template knows."""
    for name, token_id in names.items():
        if name in text:
            text = text.replace(name, f"{_OPEN}{token_id}{_CLOSE}")
    return text


def _reveal(text: str, names: Mapping[str, int]) -> str:
    for name, token_id in names.items():
        text = text.replace(f"{_OPEN}{token_id}{_CLOSE}", name)
    return text


def _encode(tokenizer: Any, text: str, names: Mapping[str, int], *, add_special_tokens: bool) -> list[int]:
    """Tokenize a text whose own special tokens are control tokens and whose stand-ins are plain text."""
    if _OPEN not in text:
        return list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        ids = _PlainNames.of(tokenizer, names).encode(text)
    else:
        ids = _encode_in_pieces(tokenizer, text, names)
    return _opening(tokenizer) + ids if add_special_tokens else ids


def _opening(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before every text."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a", add_special_tokens=True).input_ids
    starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
    return list(whole[: starts[0]]) if starts else []


def _encode_in_pieces(tokenizer: Any, text: str, names: Mapping[str, int]) -> list[int]:
    """For tokenizers without a `tokenizers` backend: split at control tokens, tokenize what is between."""
    ids: list[int] = []
    pattern = "|".join(re.escape(name) for name in names)
    for piece in re.split(f"({pattern})", text):
        if piece in names:
            ids.append(names[piece])
        elif piece:
            plain = _reveal(piece, names)
            ids += tokenizer(plain, add_special_tokens=False, split_special_tokens=True).input_ids
    return ids


class _PlainNames:
    """A copy of a fast tokenizer in which the special tokens go by private spellings.

    In it the template's own control tokens are found by their private spelling, while their usual names are
    plain text. All else (splitting, normalising, stripping beside special tokens) is the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, names: Mapping[str, int]) -> None:
        from tokenizers import Tokenizer

        self.names = dict(names)
        self.private = {name: f"\ue0f5{token_id}\ue0f6" for name, token_id in names.items()}
        data = json.loads(tokenizer.backend_tokenizer.to_str())
        data["truncation"] = data["padding"] = None
        ids = {}
        for token in data["added_tokens"]:
            token["content"] = self.private.get(token["content"], token["content"])
            ids[token["content"]] = token["id"]
        self.copy = Tokenizer.from_str(json.dumps(data))
        # The copy numbers the private spellings anew; this leads back.
        self.original = {self.copy.token_to_id(content): token_id for content, token_id in ids.items()}

    @classmethod
    def of(cls, tokenizer: Any, names: Mapping[str, int]) -> _PlainNames:
        """The tokenizer's copy, made once, and again if it got new special tokens."""
        kept = getattr(tokenizer, "_mars_plain_names", None)
        if not isinstance(kept, cls) or kept.names != dict(names):
            kept = cls(tokenizer, names)
            tokenizer._mars_plain_names = kept
        return kept

    def encode(self, text: str) -> list[int]:
        for name, private in self.private.items():
            text = text.replace(name, private)
        ids = self.copy.encode(_reveal(text, self.names), add_special_tokens=False).ids
        return [self.original.get(token_id, token_id) for token_id in ids]


def _end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template puts right behind an assistant's message."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    stand_in = f"{_OPEN}answer{_CLOSE}"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": stand_in}]
    try:
        text = _render(tokenizer, messages, False)
    except MarsError:
        return None
    _, found, rest = text.rpartition(stand_in)
    if not found:
        return None
    rest = rest.lstrip()
    names = {str(t.content): i for i, t in tokenizer.added_tokens_decoder.items()} | _special_names(tokenizer)
    for name in sorted(names, key=len, reverse=True):
        if name and rest.startswith(name):
            return int(names[name])
    return None
