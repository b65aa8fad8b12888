"""A folder of results: what was asked, what is finished, and a refusal to mix two checkpoints in it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from mars_lm.checkpoint import Checkpoint
from mars_lm.errors import MarsError
from mars_lm.provenance import provenance

_SAMPLED = 512  # elements of each parameter that the fingerprint reads


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of the weights as loaded (names, shapes, type, and some elements of each) and of the mask token.

    Two checkpoints of one run differ everywhere, so a sample of the elements tells them apart at any size.
    """
    mask = checkpoint.mars.mask_token_id if checkpoint.mars else None
    return fingerprint_of(checkpoint.model, str(mask))


def fingerprint_of(module: torch.nn.Module, beside: str = "") -> str:
    """The same of any module, and of a word beside it."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        flat = parameter.detach().reshape(-1)
        step = max(flat.numel() // _SAMPLED, 1)
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    digest.update(beside.encode())
    return digest.hexdigest()[:16]


def holds_results(folder: Path) -> bool:
    """Whether a results folder has a finished part, or a finished answer of one that is not."""
    file = folder / "results.json"
    return bool(file.is_file() and read_json(file).get("parts")) or any(folder.glob("answers/*.jsonl"))


class ResultsFolder:
    """One JSON of results, written after every part, so that a run that was killed goes on behind the last.

    It says whose they are before there are any: answers are kept one by one. As long as there is none, the
    folder is anyone's.

    Args:
        folder: where; made if it is not there.
        identity: what makes two runs the same: checkpoint, decoding, data, ... Flat, of JSON values.
    Attributes:
        parts: the finished parts by name.
    Raises:
        MarsError: the folder holds results of another checkpoint, or made with other settings.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.identity = folder, identity
        self.file = folder / "results.json"
        self.parts: dict[str, Any] = {}
        if holds_results(folder):
            kept = read_json(self.file) if self.file.is_file() else {}
            if "identity" not in kept:
                raise MarsError(f"{folder} has answers, and nothing says whose: name another --output.")
            _check_same(folder, kept["identity"], json.loads(json.dumps(identity)))
            self.parts = kept.get("parts", {})
        else:
            write_json(self.file, {"identity": identity, "parts": {}})

    def add(self, name: str, value: Any, *, seed: int | None = None) -> None:
        """Keep a finished part."""
        self.parts[name] = {**value, "provenance": provenance(seed=seed)}
        write_json(self.file, {"identity": self.identity, "parts": self.parts})


def _check_same(folder: Path, kept: dict[str, Any], asked: dict[str, Any]) -> None:
    if kept.get("checkpoint") != asked.get("checkpoint"):
        raise MarsError(
            f"{folder} has results of another checkpoint ({kept.get('model')}, {kept.get('checkpoint')}; "
            f"this is {asked.get('model')}, {asked.get('checkpoint')}): name another --output."
        )
    for name in sorted({*kept, *asked} - {"model"}):
        if kept.get(name) != asked.get(name):
            raise MarsError(
                f"{folder} has results with {name} {kept.get(name)!r}, and this run has {asked.get(name)!r}: "
                "name another --output."
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of ours.

    Raises:
        MarsError: it can't be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MarsError(f"{path} cannot be read ({error}): remove it to start anew.") from None
    if not isinstance(value, dict):
        raise MarsError(f"{path} holds no results: remove it to start anew.")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a kill leaves the old file or the new one.

    Raises:
        MarsError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value, indent=2, default=_plain) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MarsError(f"{path} cannot be written ({error.strerror}).") from error


def _plain(value: Any) -> Any:
    """What JSON does not know: numpy's numbers, tensors, paths, functions in a task's configuration."""
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
