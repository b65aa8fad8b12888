"""What transformers leaves unread in a GGUF file: how its tokenizer splits text before merging."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

# GGUF's value types 0 to 12 as struct formats; 8 is a string and 9 an array.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# llama.cpp's names of vocabularies whose merges were learned on single digits. transformers builds them all
# without that split, and then "\n\n1" or "  1" become other tokens than the model was trained on.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")


def split_digits_as_trained(tokenizer: Any, path: Path) -> None:
    """Give a tokenizer from a GGUF file the split at digits that its vocabulary was learned with.

    Args:
        tokenizer: as transformers made it, changed in place.
        path: the GGUF file.
    Raises:
        struct.error: the file is cut short.
    """
    from tokenizers import pre_tokenizers

    if read_metadata(path).get("tokenizer.ggml.pre") not in _SINGLE_DIGITS:
        return
    backend = tokenizer.backend_tokenizer
    if type(backend.pre_tokenizer) is pre_tokenizers.ByteLevel:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def read_metadata(path: Path) -> dict[str, Any]:
    """The numbers and strings in a GGUF file's header; arrays are passed over.

    Args:
        path: a GGUF file of version 2 or 3, little-endian.
    Raises:
        struct.error: the file is cut short.
    """
    with path.open("rb") as file:
        file.seek(4)
        _, _, count = _unpack(file, "IQQ")
        return {key: value for key, value in (_entry(file) for _ in range(count)) if value is not None}


def _entry(file: BinaryIO) -> tuple[str, Any]:
    key = _string(file)
    (kind,) = _unpack(file, "I")
    return key, _value(file, kind)


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _unpack(file, _FORMATS[kind])[0]
    of, length = _unpack(file, "IQ")
    if of in _FORMATS:
        file.seek(length * struct.calcsize(_FORMATS[of]), 1)
    else:
        for _ in range(length):
            _value(file, of)
    return None


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    return file.read(length).decode("utf-8", errors="replace")


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    form = f"<{form}"
    return struct.unpack(form, file.read(struct.calcsize(form)))
