"""Compile `kernels.c` for this machine, once, with the machine's own C compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from mars_lm.base_weights import cache_folder
from mars_lm.errors import MarsError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")


def library() -> ctypes.CDLL:
    """The compiled kernels, from the cache if this source was compiled on such a machine before.

    It is tried once a process: an engine after a failure gets the same answer at once.

    Raises:
        MarsError: there is no C compiler, it failed, or the result can't be stored or loaded.
    """
    made = _library()
    if isinstance(made, MarsError):
        raise MarsError(str(made)) from made
    return made


@functools.cache
def _library() -> ctypes.CDLL | MarsError:
    """The kernels, or why there are none; that is said once, as a warning."""
    try:
        return _load()
    except MarsError as error:
        logger.warning("There are no compiled CPU kernels in this process: %s", error)
        return error


def _load() -> ctypes.CDLL:
    compiler = _compiler()
    path = cache_folder() / "kernels" / f"{_key(compiler)}.so"
    try:
        if not path.is_file():
            _compile(compiler, path)
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise MarsError(f"The compiled CPU kernels can't be stored or loaded ({error}).") from error
    for function in (
        loaded.mars_vector,
        loaded.mars_queries,
        loaded.mars_has_int16,
        loaded.mars_has_tiles,
        loaded.mars_model_bytes,
    ):
        function.restype = ctypes.c_int64
    loaded.mars_decode.restype = ctypes.c_double
    return loaded


def _compiler() -> str:
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise MarsError(f"There is no C compiler ({', '.join(names)}) to build the CPU kernels with.")


def _key(compiler: str) -> str:
    """Names the source, the compiler and the processor: a cache may be shared by unlike machines."""
    processor = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (SOURCE.read_text(), *FLAGS, *_threads(), version, processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _threads() -> tuple[str, ...]:
    """Link with PyTorch's own OpenMP: two of them would fight over the processor's cores."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return (str(bundled[0]),) if bundled else ()


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(made), *_threads(), "-lm"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            lines = run.stderr.strip().splitlines() or ["no message"]
            told = next((line for line in lines if "error" in line), lines[-1])
            raise MarsError(f"The C compiler {compiler} could not build the CPU kernels: {told}")
        os.replace(made, path)  # whoever builds at the same time builds the same
