# SPDX-License-Identifier: Apache-2.0
"""Scripts that go on where one thing fails, and end in time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_encoder_cg.benchmarking.scripts import Attempts, verdict_line, write_json


def fail() -> None:
    raise ValueError("no such tower")


def test_a_failure_is_told_and_the_next_one_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    attempts = Attempts()
    assert attempts.run("bad", fail) is None
    assert attempts.run("good", lambda: 7) == 7
    assert attempts.finish("1 of 2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "bad: ValueError: no such tower"
    assert lines[-1] == "verdict: 1 PROBLEMS: bad: ValueError: no such tower; 1 of 2"


def test_nothing_is_begun_after_the_limit() -> None:
    attempts = Attempts(0.0)
    assert attempts.run("late", fail) is None
    assert attempts.problems == ["late: not begun, no time left"]


def test_a_verdict_is_one_line() -> None:
    assert verdict_line("all right") == "verdict: ok: all right"
    assert "\n" not in verdict_line("1 of 2", ["an error\nof two lines"])


def test_a_script_that_is_asked_to_end_still_says_what_it_found() -> None:
    code = """
import time
from vllm_encoder_cg.benchmarking.scripts import Attempts, prepare_environment
prepare_environment()
attempts = Attempts()
def sleep():
    print("begun", flush=True)
    time.sleep(60)
attempts.run("long", sleep)
attempts.run("next", lambda: None)
raise SystemExit(attempts.finish("0 of 2"))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "verdict: 2 PROBLEMS: long: ended after 0 s; 0 of 2" in output
    assert "next: not begun" in output


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.json"
    write_json(path, {"path": path})
    with pytest.raises(ValueError, match="Circular"):
        circle: list[object] = []
        circle.append(circle)
        write_json(path, circle)
    assert json.loads(path.read_text()) == {"path": str(path)}
    assert list(path.parent.iterdir()) == [path]
