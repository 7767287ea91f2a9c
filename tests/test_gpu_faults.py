# SPDX-License-Identifier: Apache-2.0
"""The script of GPU fault checks, on the CPU at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_faults import support
from benchmarks.gpu_faults.__main__ import main
from benchmarks.gpu_faults.support import Check, Context


def run(*arguments: str, out: Path) -> tuple[int, list[dict[str, object]]]:
    code = main(["--vision", "small", "--out", str(out), *arguments])
    report = json.loads((out / "gpu-faults.json").read_text())
    return code, report["checks"]


def test_checks_that_need_no_gpu_pass_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = run("--only", "outputs lie", "weights: written", out=tmp_path)
    assert code == 0, checks
    assert [check["passed"] for check in checks] == [True, True]
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines[-3:-1]] == ["PASS", "PASS"]
    assert lines[-1] == "verdict: ok: 2 of 2 checks passed"


def test_a_check_that_fails_is_told_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(context: Context) -> None:
        context.figures["error"] = 0.5
        raise AssertionError("an embedding differs")

    checks = [
        Check("first", fails, gpu_only=False),
        Check("on a GPU", fails, gpu_only=True),
        Check("last", lambda context: None, gpu_only=False),
    ]
    monkeypatch.setattr(support, "CHECKS", checks)
    code, outcomes = run(out=tmp_path)
    assert code == 1
    assert [outcome["name"] for outcome in outcomes] == ["first", "last"]
    assert outcomes[0]["figures"] == {"error": 0.5}
    output = capsys.readouterr().out
    assert "FAIL  first (0 s): AssertionError: an embedding differs" in output
    assert "PASS  last" in output


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == len(set(names)) > 10
