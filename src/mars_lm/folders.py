"""Replace a folder in one step: whoever is killed while writing leaves the old folder, or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from mars_lm.errors import MarsError

try:
    import fcntl
except ImportError:  # no flock on this platform: leftovers are then never taken for abandoned
    fcntl = None  # type: ignore[assignment]

_MARK = ".mars-saving-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def replaced_folder(directory: str | Path, *, replaces: Callable[[str], bool]) -> Iterator[Path]:
    """Give an empty sibling folder to write in, and put it in the place of `directory` at the end.

    At every moment `directory` is the complete old folder or the complete new one. (Where the file system
    cannot exchange two folders in one step, a kill between two renames leaves none there, and the next call
    brings the old one back first.) Files are flushed to the disk before the exchange.

    Args:
        directory: where the folder shall be; parents are made.
        replaces: says of a top-level name in the old folder whether it is part of what is being replaced;
            all else is the user's, and is carried over into the new folder.
    Raises:
        MarsError: no space left, no permission, or a path that cannot be a folder; all is as before.
    """
    target = Path(os.path.realpath(directory))
    temporary: Path | None = None
    lock: int | None = None
    try:
        if target.exists() and not target.is_dir():
            raise MarsError(f"{directory} is a file, expected a folder (or nothing) to save into.")
        target.parent.mkdir(parents=True, exist_ok=True)
        _clean_leftovers(target)
        temporary = target.parent / f".{target.name}{_MARK}new-{secrets.token_hex(4)}"
        temporary.mkdir()
        lock = _lock(temporary)
        yield temporary
        _share_as_usual(temporary)
        if target.exists():
            _carry_over(target, temporary, replaces)
        _sync_tree(temporary)
        _put_in_place(temporary, target)
        with contextlib.suppress(OSError):  # it is in its place by now; the disk learns of it a little later
            _sync(target.parent)
    except OSError as error:
        raise MarsError(_disk_sentence(error, directory)) from error
    finally:
        if temporary is not None:
            # After an exchange this is the old folder; after a failure it is the unfinished new one.
            shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def is_no_space(error: BaseException) -> bool:
    """True if the error, whatever library raised it, says that the disk (or the quota) is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left" in str(error) or "quota exceeded" in str(error).lower()


def _disk_sentence(error: OSError, directory: str | Path) -> str:
    if is_no_space(error):
        return (
            f"No space is left on the disk of {directory}: nothing was saved, and what was there before is "
            "unchanged; free some space and save again."
        )
    reason = error.strerror or str(error)
    return f"{directory} cannot be written ({reason}): choose a folder that you may write to."


def _clean_leftovers(target: Path) -> None:
    """Remove what killed saves left beside `target`; bring the old folder back where a kill left none."""
    for leftover in sorted(target.parent.glob(f".{target.name}{_MARK}*")):
        if f"{_MARK}old-" in leftover.name and not target.exists():
            os.rename(leftover, target)
        elif _is_abandoned(leftover):
            shutil.rmtree(leftover, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """Hold a lock on a folder for as long as this process lives, so that no one takes it for a leftover."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _is_abandoned(folder: Path) -> bool:
    if fcntl is None:
        return False
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _carry_over(old: Path, new: Path, replaces: Callable[[str], bool]) -> None:
    for entry in old.iterdir():
        if replaces(entry.name) or (new / entry.name).exists():
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(entry), new / entry.name)
        elif entry.is_dir():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(str(entry), str(new / entry.name))


def _link_or_copy(source: str, destination: str) -> str:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
    return destination


def _put_in_place(temporary: Path, target: Path) -> None:
    if not target.exists():
        os.rename(temporary, target)
        return
    if _exchange(temporary, target):
        return
    aside = target.parent / f".{target.name}{_MARK}old-{secrets.token_hex(4)}"
    os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step (Linux renameat2); False where that cannot be done."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(done == 0)


def _share_as_usual(folder: Path) -> None:
    """Let others read the files as the umask has it: safetensors makes its own readable by the owner alone.

    A server that runs as another user, in a container for one, could not load them.
    """
    usual = folder.stat().st_mode & 0o666  # mkdir applied the umask, which can only be read by setting it
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path) / name
            if not file.is_symlink():
                file.chmod(file.stat().st_mode | usual)


def _sync_tree(folder: Path) -> None:
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path) / name
            if not file.is_symlink():
                _sync(file)
        _sync(Path(path))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # a file system that cannot sync
            raise
    finally:
        os.close(handle)
