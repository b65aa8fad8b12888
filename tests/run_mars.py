"""Run the `mars` command: within the test's process where that will do, else as a user does."""

from __future__ import annotations

import dataclasses
import io
import os
import pty
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from mars_lm.cli.main import main


@dataclasses.dataclass
class Done:
    code: int
    out: str
    err: str


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def run_mars(
    *arguments: object, stdin: str | bytes = b"", terminal: bool = False, stdin_terminal: bool = False
) -> Done:
    """Run it in this process; torch is loaded once for all tests.

    Args:
        stdin: what is piped in.
        terminal: stdout and stderr say that they are a terminal.
        stdin_terminal: stdin does.
    """
    wrapper = _Terminal if terminal else io.TextIOWrapper
    out, err = (wrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    data = stdin.encode("utf-8") if isinstance(stdin, str) else stdin
    source = (_Terminal if stdin_terminal else io.TextIOWrapper)(io.BytesIO(data), encoding="utf-8")
    code = 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "argv", ["mars", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", source),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
    return Done(code, *texts)


def mars_command(*arguments: object) -> list[str]:
    """The command line of a `mars` in a process of its own."""
    return [sys.executable, "-m", "mars_lm.cli.main", *map(str, arguments)]


def mars_environment(**extra: str) -> dict[str, str]:
    """An environment without what would change colours."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    return {**environment, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **extra}


def run_on_pty(command: Sequence[str], environment: dict[str, str]) -> Done:
    """Run a command on a pseudo-terminal; what it prints is all in `out`."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True
    )
    os.close(follower)
    output = b""
    while True:
        ready, _, _ = select.select([leader], [], [], 120)
        try:
            chunk = os.read(leader, 4096) if ready else b""
        except OSError:  # Linux ends a pty with an error
            chunk = b""
        if not chunk:
            break
        output += chunk
    os.close(leader)
    return Done(process.wait(timeout=60), output.decode("utf-8").replace("\r\n", "\n"), "")
