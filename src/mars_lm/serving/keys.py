"""API keys from a file, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from mars_lm.errors import MarsError


class Keys:
    """A set of keys that can be asked whether it holds one, and tells nothing else."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Keys from a file, one a line; empty lines and lines that start with # are skipped.

        Raises:
            MarsError: the file can't be read, is not text, or holds no key.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise MarsError(f"The key file {path} can't be read ({reason}).") from None
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise MarsError(f"The key file {path} holds no key: write one a line.")
        return cls(keys)

    def accept(self, key: str | None) -> bool:
        """Whether the key is one of these. Every key is compared whole, so that time tells nothing."""
        digest = hashlib.sha256((key or "").encode("utf-8", "surrogateescape")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found and bool(key)


def bearer(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The key of an `Authorization: Bearer …` header."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            return key.strip() if scheme.lower() == "bearer" else None
    return None
