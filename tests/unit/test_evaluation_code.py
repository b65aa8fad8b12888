"""Generated code runs confined: in time, in memory, without network, files or children."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from mars_lm.errors import MarsError
from mars_lm.evaluation.code_execution import CodeEval, filter_program, run_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the confinement is Linux's")


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("import math, typing, collections; assert math.gcd(12, 18) == 6", "passed"),
        ("assert 1 == 2", "failed"),
        ("this is no program", "failed"),
        ("raise SystemExit(0)", "failed"),  # an early exit is not a pass
        ("import os; os._exit(0)", "failed"),
        ("def f(): return f()\nf()", "failed"),
        ("x = 'a' * (2 << 30)", "failed"),
        ("import socket; socket.socket()", "failed"),
        ("import os; os.fork()", "failed"),
        ("import subprocess; subprocess.run(['true'])", "failed"),
        ("open('made', 'w')", "failed"),
        ("open('/dev/null', 'a')", "failed"),
        ("import os; os.kill(os.getppid(), 0)", "failed"),
    ],
)
def test_how_programs_end(program: str, kind: str) -> None:
    assert run_code(program, seconds=20, megabytes=512).kind == kind


def test_time_is_limited() -> None:
    assert run_code("while True: pass", seconds=1.5).kind == "timed out"


def test_files_of_others_stay(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("here")
    for program in (
        f"import os; os.unlink({str(kept)!r})",
        f"import os; os.rename({str(kept)!r}, {str(kept) + '2'!r})",
        f"open({str(kept)!r}, 'w')",
        f"import os; os.truncate({str(kept)!r}, 0)",
        f"import os; os.chmod({str(kept)!r}, 0)",
    ):
        assert run_code(program).kind == "failed", program
    assert kept.read_text() == "here"
    assert run_code(f"assert open({str(kept)!r}).read() == 'here'").passed  # reading leads nowhere


def test_an_unknown_processor_is_refused() -> None:
    with pytest.raises(MarsError, match="riscv64"):
        filter_program("riscv64")


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    right, wrong = "def f(): return 1", "def f(): return 2"
    scores, outcomes = CodeEval().compute(
        references=["assert f() == 1", "assert f() == 1"],
        predictions=[[right, wrong, wrong], [wrong, wrong, wrong]],
        k=[1, 2],
    )
    # One right of three: pass@1 is 1/3, pass@2 is 1 - C(2,2)/C(3,2) = 2/3; the other problem has none.
    assert scores == {"pass@1": pytest.approx(1 / 6), "pass@2": pytest.approx(1 / 3)}
    assert [row["passed"] for _, row in outcomes[0]] == [True, False, False]
