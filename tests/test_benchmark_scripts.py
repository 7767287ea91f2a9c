# SPDX-License-Identifier: Apache-2.0
"""The benchmark scripts answer ``--help``, and their tables add up."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import encoder_latency, mm_processor
from vllm_encoder_cg.benchmarking.encoder import EncoderBenchmark
from vllm_encoder_cg.benchmarking.timing import CaseTimes

FOLDER = Path(encoder_latency.__file__).parent
README = (FOLDER / "README.md").read_text()
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_a_line_in_the_readme(script: str) -> None:
    result = subprocess.run(
        [sys.executable, str(FOLDER / script), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert f"benchmarks/{script}" in README


def test_overview_of_several_encoders() -> None:
    def row(ours: float, **others: float) -> CaseTimes:
        times = {"ours": ours, **{k.replace("_", "-"): v for k, v in others.items()}}
        return CaseTimes("case", 1, 100, times)

    about = {"architecture": "Model", "backend": "FLASH_ATTN"}
    rows = [row(2.0, eager=4.0, floor=2.0), row(4.0, eager=4.0, floor=2.0)]
    table = encoder_latency._overview([EncoderBenchmark(about, {}, rows)])
    assert table.splitlines()[-1] == "| Model-FLASH_ATTN | 1.000 |  | 1.414 (2.000) |"


class TestMmProcessor:
    @pytest.fixture
    def arguments(self, tmp_path: Path) -> argparse.Namespace:
        return argparse.Namespace(out=tmp_path, vision="small", prompts=4, timeout=1.0)

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What would have been run; as if this package were never active."""
        commands: list[Any] = []

        def run(command: list[str], **options: Any) -> Any:
            commands.append((command, options["env"]))
            output = Path(command[command.index("--output-json") + 1])
            forward = {"mean": 2.0, "median": 1.5, "p99.0": 9.0}
            output.write_text(
                json.dumps(
                    {
                        "completed": 4,
                        "mm_processor_stats": {"encoder_forward_ms": forward},
                    }
                )
            )
            return SimpleNamespace(returncode=0, stdout="", stderr="")

        monkeypatch.setattr(mm_processor.subprocess, "run", run)
        return commands

    def test_in_tree_runs_without_this_package(
        self, arguments: argparse.Namespace, commands: list[Any]
    ) -> None:
        record = mm_processor.run(
            "twenty", "FLASH_ATTN", "in-tree", Path("model"), arguments
        )
        ((command, environment),) = commands
        assert environment["VLLM_ENCODER_CG_DISABLE"] == "1"
        config = json.loads(command[command.index("--compilation-config") + 1])
        assert config["cudagraph_mm_encoder"] is True
        assert config["encoder_cudagraph_max_vision_items_per_batch"] == 8
        assert record["p99_encoder_forward_ms"] == 9.0

    def test_eager_has_no_graphs(
        self, arguments: argparse.Namespace, commands: list[Any]
    ) -> None:
        mm_processor.run("mixed", "FLASH_ATTN", "eager", Path("model"), arguments)
        ((command, _),) = commands
        assert "cudagraph_mm_encoder" not in " ".join(command)

    def test_a_run_without_our_graphs_is_no_result_of_ours(
        self, arguments: argparse.Namespace, commands: list[Any]
    ) -> None:
        with pytest.raises(RuntimeError, match="not active"):
            mm_processor.run("mixed", "FLASH_ATTN", "ours", Path("model"), arguments)

    def test_the_table_has_what_ours_saves(self) -> None:
        def record(way: str, mean: float) -> dict[str, Any]:
            return {
                "workload": "mixed",
                "backend": "FLASH_ATTN",
                "way": way,
                "mean_encoder_forward_ms": mean,
                "p99_encoder_forward_ms": 2 * mean,
            }

        table = mm_processor.markdown([record("eager", 8.0), record("ours", 2.0)])
        assert table.splitlines()[-2:] == [
            "| mixed | FLASH_ATTN | mean | 8.00 |  | 2.00 | 0.250 |  |",
            "| mixed | FLASH_ATTN | p99 | 16.00 |  | 4.00 | 0.250 |  |",
        ]
