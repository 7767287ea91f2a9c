# SPDX-License-Identifier: Apache-2.0
"""Benchmark scripts for GPUs, from the arguments to the last line, without one.

Nothing is recorded or timed that means anything; but what would end a run on a GPU
(an argument, a table, a name that is no more) ends it here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_check, host_work, padding_gap, replay_staircase
from benchmarks.fused_forward import __main__ as fused_forward
from benchmarks.fused_forward import encoder as fused_encoder
from benchmarks.fused_forward import profiles as fused_profiles
from tests.support.pretend_cuda import pretend_cuda
from vllm_encoder_cg.benchmarking import cases
from vllm_encoder_cg.benchmarking.cases import BenchCase
from vllm_encoder_cg.verification_cases import images

QWEN3 = "Qwen3VLForConditionalGeneration"
GEMMA3 = "Gemma3ForConditionalGeneration"
SMALL = ["--vision", "small", "--max-tokens", "256"]
FEW_GRAPHS = ["--settings", '{"max_graphs": 3, "ladder": "power_of_two"}']
CASES = (
    BenchCase("1 x 224x224", images((64, 64))),
    BenchCase("4 x 336x336", images(*[(64, 96)] * 4)),
)


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with pretend_cuda():
        yield


def run(
    script: Any, out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> int:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("sys.argv", ["script", "--out", str(out), *arguments])
    return script.main()


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_gpu_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "--max-graphs", "3", "--random-batches", "1", GEMMA3, "None"]
    assert run(gpu_check, tmp_path, monkeypatch, *arguments) == 1
    (file,) = tmp_path.glob("*.json")
    report = json.loads(file.read_text())
    assert report["complete"] and gpu_check.problems(report) == []
    assert len(report["cases"]) > 10
    line = last_line(capsys)
    assert line.startswith("verdict: 1 PROBLEMS: None") and "1 of 2 encoders" in line


def test_host_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rounds", "1", "--max-tokens", "256", GEMMA3]
    assert run(host_work, tmp_path, monkeypatch, *arguments) == 0
    records = json.loads((tmp_path / "summary.json").read_text())
    assert [record["items"] for record in records] == [1, 20]
    assert "around the replay at most: 1 images" in last_line(capsys)


def test_padding_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "STANDARD_CASES", CASES)
    arguments = [*SMALL, *FEW_GRAPHS, "--rounds", "3", QWEN3]
    assert run(padding_gap, tmp_path, monkeypatch, *arguments) == 0
    records = json.loads((tmp_path / "summary.json").read_text())
    assert {record["case"] for record in records} == {"4 x 336x336"}
    assert records[0]["graph"] == "exact" and len(records) >= 5
    assert "of exact at most: 4 x 336x336" in last_line(capsys)


def test_replay_staircase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--smallest", "64", "--largest", "128", "--step", "32"]
    assert run(replay_staircase, tmp_path, monkeypatch, *SMALL, *sizes, QWEN3) == 0
    records = json.loads((tmp_path / "summary.json").read_text())
    assert [record["token_budget"] for record in records] == [64, 96, 128]
    assert "3 budgets" in last_line(capsys)


def test_fused_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fused_encoder, "STANDARD_CASES", CASES)
    monkeypatch.setattr(fused_encoder, "_PROFILED_CASES", ("1 x 224x224",))
    on_cpu = SimpleNamespace(CUDA=fused_profiles.ProfilerActivity.CPU)
    monkeypatch.setattr(fused_profiles, "ProfilerActivity", on_cpu)
    arguments = [*SMALL, *FEW_GRAPHS, "--rounds", "3", "--steps", "--no-kernel-check"]
    assert run(fused_forward, tmp_path, monkeypatch, *arguments, QWEN3, "None") == 1
    found, failed = json.loads((tmp_path / "fused.json").read_text())["encoders"]
    assert [row["case"] for row in found["cases"]] == [case.name for case in CASES]
    assert found["problems"] == [] and "KeyError" in failed["problems"][0]
    assert found["errors"] == {}, "vLLM's products on a CPU know no float64"
    assert "norms and additions apart" in found["steps"]["1 x 224x224"]
    assert "1 PROBLEMS: None: KeyError" in last_line(capsys)
