# SPDX-License-Identifier: Apache-2.0
"""The script for several GPUs, on the CPU at small sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.multi_gpu.__main__ import describe, is_wrong, main, parse_arguments

ARCHITECTURE = "InternVLChatModel"


def test_checks_and_times_an_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        f"--ranks 2 --vision small --output {tmp_path} --parts correctness timing "
        f"--architectures {ARCHITECTURE} --modes data --backends TORCH_SDPA "
        "--batches 2 --rounds 3".split()
    )
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    (checked,) = json.loads((tmp_path / "correctness-2.json").read_text())
    assert checked["problems"] == [] and checked["error"] < 1e-4
    assert checked["replayed"] > 0 and checked["eager"] > 0
    timed = json.loads((tmp_path / "timing-2.json").read_text())
    ways = [row["way"] for row in timed if "way" in row]
    assert ways == ["eager", "ours"]
    assert {row["exchange"] for row in timed if "exchange" in row} >= {
        "vote",
        "all_gather, equal",
    }
    assert any(line.endswith("right") for line in lines)
    assert sum("P99" in line for line in lines) == 2


def test_a_part_that_fails_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(part: str, ranks: int, options: Any) -> list[dict[str, Any]]:
        if part == "correctness":
            raise RuntimeError("no such GPU")
        return [{"encoder": "some", "way": "ours", "mean_ms": 1.0, "p99_ms": 2.0}]

    monkeypatch.setattr("benchmarks.multi_gpu.__main__.run_part", run_part)
    code = main(["--ranks", "3", "--output", str(tmp_path)])
    output = capsys.readouterr().out
    assert code == 1
    assert "correctness: RuntimeError: no such GPU" in output
    assert output.count("some, ours") == 3
    assert (tmp_path / "mm-processor-3.json").exists()


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"problems": ["differs"]}, True),
        ({"problems": []}, False),
        ({"equal_tokens": False}, True),
        ({"equal_tokens": True}, False),
        ({"mean_ms": 1.0}, False),
    ],
)
def test_what_fails_a_run(row: dict[str, Any], wrong: bool) -> None:
    assert is_wrong(row) == wrong


def test_lines_of_the_table() -> None:
    row = {
        "engine": "V1, tensor parallel, data",
        "equal_tokens": False,
        "graphs_by_rank": [4, 0],
        "hits_by_rank": [9, 0],
        "problems": ["a rank has no graphs"],
    }
    line = describe(row)
    assert "OTHER TOKENS; graphs by rank [4, 0], hits [9, 0]: a rank has" in line
    exchange = {"exchange": "vote", "us": 81.4, "chosen": True}
    assert describe(exchange).split() == ["vote", "81", "us", "(chosen)"]


def test_a_negative_number_of_ranks_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--ranks", "-1"])
    assert "--ranks: got -1" in capsys.readouterr().err
