"""Where a model is (Hub, folder, GGUF file), whether it is whole, and what is said when it is not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import struct
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mars_lm.errors import MarsError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where `from_pretrained` finds a model.

    Attributes:
        name: what the user wrote.
        path: a folder or a Hub id.
        gguf_file: the file's name inside the folder.
        on_hub: True if `path` is a Hub id.
    """

    name: str
    path: str
    gguf_file: str | None = None
    on_hub: bool = False

    def options(self, revision: str | None) -> dict[str, Any]:
        """The keyword arguments that every `from_pretrained` call for it takes."""
        options: dict[str, Any] = {"trust_remote_code": False}
        if self.gguf_file:
            options["gguf_file"] = self.gguf_file
        if self.on_hub:
            options["revision"] = revision or "main"
            options["local_files_only"] = not _hub_answers()
        return options

    @property
    def complaint(self) -> str:
        """How a sentence about a failure to load it begins."""
        if self.on_hub:
            return f"There is no folder {self.name}, and it cannot be had from the Hugging Face Hub either"
        return f"{self.name} cannot be loaded"


def locate(name: str) -> Source:
    """Tell a Hub id, a folder and a GGUF file apart, and see whether a local one is whole.

    Args:
        name: as the user wrote it.
    Raises:
        MarsError: nothing there, no model, or a damaged one.
    """
    if not name:
        raise MarsError("The model's name is empty: expected a Hub id, a folder, or a .gguf file.")
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return Source(name, str(path))
    if path.suffix.lower() == ".gguf":
        _check_gguf(path)
        return Source(name, str(path.parent), path.name)
    if path.exists():
        raise MarsError(f"{name} is a file, expected a checkpoint's folder, a .gguf file, or a Hub id.")
    if not is_hub_id(name):
        raise MarsError(f"There is no folder {name}, and it is no Hub id (owner/name) either.")
    return Source(name, name, on_hub=True)


def is_hub_id(name: str) -> bool:
    """True if the name could be a repository's on the Hugging Face Hub."""
    return bool(_HUB_ID.fullmatch(name)) and ".." not in name


@contextlib.contextmanager
def told_in_one_sentence(what: str) -> Iterator[None]:
    """Turn whatever the libraries below raise for bad input into one sentence.

    Args:
        what: how the sentence begins; the first line of the library's own reason follows.
    """
    try:
        yield
    except MarsError:
        raise
    except MemoryError as error:
        raise MarsError(f"{what}: there is not enough memory.") from error
    except Exception as error:  # config, tokenizer, safetensors, GGUF and torch each raise kinds of their own
        raise MarsError(f"{what}: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    said = str(error)
    # What readers of cut or garbled files stumble over says nothing to who has such a file.
    if isinstance(error, (struct.error, IndexError, UnicodeDecodeError)) or re.search(
        r"cannot reshape array|requires a buffer|Weights only load failed|central directory", said
    ):
        return "the file is damaged or cut short; copy or download it again"
    if "instantiate the backend tokenizer" in said:
        return "there is no tokenizer.json, nor another file to make one from"
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:
        lines[0] += f" {lines[1]}"
    reason = lines[0].rstrip(".:,")
    return f"it lacks {reason}" if isinstance(error, KeyError) else reason


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint.

    Raises:
        MarsError: it is missing, cut short, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MarsError(
            f"{path} is not readable JSON ({error}): the checkpoint is damaged; copy it again."
        ) from error
    if not isinstance(value, dict):
        raise MarsError(f"{path} is not a JSON object: the checkpoint is damaged; copy it again.")
    return value


def check_weights(folder: Path) -> None:
    """See that every safetensors file in a folder is there and whole; only headers are read.

    Raises:
        MarsError: a shard is missing, or a file is cut short.
    """
    for index in sorted(folder.glob("*.safetensors.index.json")):
        shards = set(read_json(index).get("weight_map", {}).values())
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise MarsError(
                f"{folder} is incomplete: {', '.join(missing)} is missing; copy or download it again."
            )
    for weights in sorted(folder.glob("*.safetensors")):
        if not _is_whole(weights):
            raise MarsError(
                f"{weights} is damaged or cut short ({weights.stat().st_size} bytes): copy or download it "
                "again."
            )


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        found = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; name the GGUF file itself, such as {folder / found[0]}" if found else ""
        raise MarsError(
            f"{folder} is no checkpoint: it has no config.json, which save_pretrained and mars write{hint}."
        )
    # A generation config that cannot be read would be passed over in silence, and its end tokens with it.
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)
    check_weights(folder)


def _check_gguf(path: Path) -> None:
    if not path.is_file():
        raise MarsError(f"There is no file {path}.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise MarsError(f"{path} is not a GGUF file, whatever its name says.")


def _is_whole(path: Path) -> bool:
    """A safetensors file says in its header how long it must be: 8 bytes, the header, the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return False
        (length,) = struct.unpack("<Q", start)
        if 8 + length > size:
            return False
        try:
            header = json.loads(file.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            return False
    return bool(8 + length + max(ends, default=0) == size)


def _hub_answers() -> bool:
    """False if the Hub is out of reach; its client would try for half a minute before it says so."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    if address.scheme in urllib.request.getproxies() or not address.hostname:
        return True  # who goes through a proxy cannot tell by a direct connection
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname, port), timeout=5):
            return True
    except OSError:
        return False


def bytes_of(folder: Path) -> int:
    """The size of all files in a folder, those that vanish meanwhile left out."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(path) / name).stat().st_size
    return total
