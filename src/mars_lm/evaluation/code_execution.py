"""Run code that a model wrote: in a process of its own, with limits, without network, files or children.

The child limits its time and memory, and then installs a seccomp filter, after which the kernel refuses
whatever opens a connection, changes a file or makes a process. It needs Linux on x86-64 or arm64.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from mars_lm.errors import MarsError

SECONDS = 10.0
MEGABYTES = 1024

# System calls that are refused with EPERM, as (x86-64, arm64); None: the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "io_uring_setup": (425, 425),
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "pidfd_open": (434, 434),
    "ptrace": (101, 117),
    "process_vm_writev": (311, 271),
    "setns": (308, 268),
    "unshare": (272, 97),
    "mount": (165, 40),
    "umount2": (166, 39),
    "creat": (85, None),
    "openat2": (437, 437),
    "truncate": (76, 45),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
}
# Opening a file is refused where its flags ask to write: (call, the argument that holds the flags).
_OPENS: dict[str, tuple[tuple[int | None, int | None], int]] = {
    "open": ((2, None), 1),
    "openat": ((257, 56), 2),
}
_WRITING = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def filter_program(machine: str) -> list[tuple[int, int, int, int]]:
    """The seccomp filter as BPF instructions (code, jump if true, jump if false, constant).

    Raises:
        MarsError: no filter is known for this processor.
    """
    if machine not in _ARCHITECTURES:
        raise MarsError(f"Generated code cannot be run safely on {machine}: use Linux on x86-64 or arm64.")
    column = list(_ARCHITECTURES).index(machine)
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000
    program = [
        (load, 0, 0, 4),  # the architecture: a 32-bit call would have other numbers
        (equal, 1, 0, _ARCHITECTURES[machine]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the call's number
        (at_least, 0, 1, 0x40000000),  # x32, likewise
        (give, 0, 0, kill),
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    for numbers, argument in _OPENS.values():
        if (number := numbers[column]) is not None:
            program += [
                (equal, 0, 4, number),
                (load, 0, 0, 16 + 8 * argument),
                (any_bit, 0, 1, _WRITING),
                (give, 0, 0, refuse),
                (give, 0, 0, allow),
            ]
    return [*program, (give, 0, 0, allow)]


# What the child runs. It gets the filter as a literal, and the program on stdin.
_CHILD = """
import ctypes, resource, sys
program = sys.stdin.read()
megabytes, seconds, rules = {megabytes}, {seconds}, {rules}
for kind, limit in (
    (resource.RLIMIT_AS, megabytes << 20), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 16),
):
    resource.setrlimit(kind, (limit, limit))
sys.setrecursionlimit(5000)
class Rule(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8), ("if_false", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("rules", ctypes.POINTER(Rule))]
array = (Rule * len(rules))(*[Rule(*rule) for rule in rules])
libc = ctypes.CDLL(None, use_errno=True)
refused = libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Program(len(rules), array)), 0, 0)
if refused:
    sys.exit(97)
del ctypes, resource, Rule, Program, array, libc
sys.modules.pop("ctypes", None)
exec(compile(program, "<generated>", "exec"), {{"__name__": "__main__"}})
sys.exit({done})
"""
_DONE = 43  # the program ran to its end; exit status 0 may be its own early exit


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended: "passed", "failed" (an exception, an exit, a limit) or "timed out"."""

    kind: str
    message: str = ""

    @property
    def passed(self) -> bool:
        return self.kind == "passed"


def run_code(program: str, *, seconds: float = SECONDS, megabytes: int = MEGABYTES) -> Outcome:
    """Run a Python program that nobody has read.

    Args:
        program: its text; it passes if it ends without an exception.
        seconds: of wall clock, and of processor time.
        megabytes: of address space.
    Raises:
        MarsError: this machine has no means to confine it.
    """
    if sys.platform != "linux":
        raise MarsError(f"Generated code cannot be run safely on {sys.platform}: use Linux.")
    child = _CHILD.format(
        megabytes=megabytes, seconds=int(seconds) + 1, rules=filter_program(platform.machine()), done=_DONE
    )
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", child],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            # Half a surrogate pair is no text, and no program.
            _, error = process.communicate(program.encode("utf-8", errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Outcome("timed out")
    if process.returncode == 97:
        raise MarsError("Generated code cannot be run safely here: the kernel takes no seccomp filter.")
    lines = error.decode("utf-8", errors="replace").strip().splitlines()
    message = lines[-1] if lines else f"exit status {process.returncode}"
    return Outcome("passed") if process.returncode == _DONE else Outcome("failed", message)


class CodeEval:
    """What the harness's code tasks take from the `evaluate` library: the metric `code_eval`, confined."""

    def compute(
        self,
        references: Sequence[str],
        predictions: Sequence[Sequence[str]],
        k: Sequence[int] = (1,),
        **_: Any,
    ) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
        """Run every candidate with its test.

        Args:
            references: a test a problem; predictions: its candidate programs.
            k: for pass@k, the unbiased estimate over the candidates.
        Returns:
            pass@k, and each candidate's outcome.
        """
        outcomes: dict[int, list[tuple[int, dict[str, Any]]]] = {
            number: [
                (at, {"passed": outcome.passed, "result": outcome.kind})
                for at, candidate in enumerate(candidates)
                for outcome in [run_code(f"{candidate}\n{test}")]
            ]
            for number, (candidates, test) in enumerate(zip(predictions, references, strict=True))
        }
        scores = {}
        for count in k:
            chances = [
                _pass_at(len(rows), sum(row["passed"] for _, row in rows), count)
                for rows in outcomes.values()
                if len(rows) >= count
            ]
            if chances:
                scores[f"pass@{count}"] = sum(chances) / len(chances)
        return scores, outcomes


def _pass_at(total: int, right: int, count: int) -> float:
    """1 - C(total - right, count) / C(total, count)."""
    missed = 1.0
    for i in range(count):
        missed *= max(total - right - i, 0) / (total - i)
    return 1.0 - missed
