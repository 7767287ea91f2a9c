# SPDX-License-Identifier: Apache-2.0
"""Engines of the script for several GPUs: each ends within its time, and wholly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.multi_gpu.processes import Job, run_jobs
from benchmarks.multi_gpu.results import NOT_BEGUN, TimeLimit

LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
print("was here")
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for_end(pid: int) -> bool:
    for _ in range(100):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", ["ends", "hangs", "is left"])
def test_no_process_is_left_behind(how: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = LEAVES_A_CHILD + ("" if how == "ends" else "import time; time.sleep(600)")
    job = Job("some", ["-c", program, str(pid_file)])
    jobs = run_jobs([job], tmp_path, TimeLimit(60, 2.0))
    if how == "is left":
        following = run_jobs(
            [Job("quick", ["-c", ""]), job], tmp_path, TimeLimit(60, 9), 2
        )
        next(following)
        for _ in range(200):
            if pid_file.exists() and pid_file.read_text():
                break
            time.sleep(0.05)
        following.close()
    else:
        ((_, outcome),) = jobs
        assert "was here" in outcome.log or how == "hangs"
        assert (outcome.error is None) == (how == "ends")
        if how == "hangs":
            assert outcome.error is not None and "took more than 2 s" in outcome.error
    assert wait_for_end(int(pid_file.read_text()))


def test_a_program_that_fails_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    jobs = [
        Job("a/b", ["-c", "raise SystemExit('no such card')"]),
        Job("c", ["-c", ""]),
    ]
    first, second = run_jobs(jobs, tmp_path, TimeLimit(60, 60))
    assert first[1].error is not None
    assert "exit code 1" in first[1].error and "no such card" in first[1].error
    assert second[1].error is None


def test_what_does_not_begin_in_time_is_told(tmp_path: Path) -> None:
    jobs = [Job("a", ["-c", ""]), Job("b", ["-c", ""])]
    outcomes = [outcome for _, outcome in run_jobs(jobs, tmp_path, TimeLimit(1, 1))]
    assert [outcome.error for outcome in outcomes] == [NOT_BEGUN] * 2
