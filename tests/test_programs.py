# SPDX-License-Identifier: Apache-2.0
"""Programs that scripts start: nothing of them is left behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from vllm_encoder_cg.benchmarking.programs import Program, end_all

ENDS_LATE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("tidy"), sys.exit(3)))
print("there", flush=True)
time.sleep(600)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("there", flush=True)
time.sleep(600)
"""


def started(code: str, folder: Path, name: str = "log") -> Program:
    """Having written something."""
    program = Program(["-c", code], folder / name)
    while not program.log and program.seconds < 30:
        time.sleep(0.02)
    return program


def test_what_a_program_writes_and_how_it_ends(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['WHO'], os.getcwd()); sys.exit(7)"
    folder = tmp_path / "folder"
    folder.mkdir()
    program = Program(["-c", code], tmp_path / "log", {"WHO": "me"}, folder)
    assert program.wait(30) and program.has_ended
    assert program.code == 7
    assert program.log.split() == ["me", str(folder.resolve())]
    program.end()  # again: nothing is there
    assert program.code == 7


def test_one_that_runs_on_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    program = started(DEAF, tmp_path)
    assert not program.wait(0.2)
    assert program.code is None
    program.end()
    assert program.code == -9


def test_programs_may_tidy_up_before_they_are_ended(tmp_path: Path) -> None:
    late = started(ENDS_LATE, tmp_path, "late")
    deaf = started(DEAF, tmp_path, "deaf")
    end_all([late, deaf], grace_s=5.0)
    assert (late.code, deaf.code) == (3, -9)
    assert late.log.split() == ["there", "tidy"]


def test_ctrl_c_reaches_the_program(tmp_path: Path) -> None:
    code = "import time; print('there', flush=True); time.sleep(600)"
    program = started(code, tmp_path)
    program.stop(30)
    assert program.has_ended
    assert "KeyboardInterrupt" in program.log


def test_none_is_left_where_waiting_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by SIGTERM, which scripts take as an exception."""
    programs = [started(DEAF, tmp_path, name) for name in ("a", "b")]

    def asked_to_end(self: Program, limit_s: float) -> bool:
        raise SystemExit(143)

    monkeypatch.setattr(Program, "wait", asked_to_end)
    with pytest.raises(SystemExit):
        end_all(programs, 5.0)
    with pytest.raises(SystemExit):
        programs[0].stop(5.0)
    assert [program.code for program in programs] == [-9, -9]
