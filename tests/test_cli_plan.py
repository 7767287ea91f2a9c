# SPDX-License-Identifier: Apache-2.0
"""``vllm-encoder-cg plan``: from a trace, or a stated mix, to flags to paste."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_encoder_cg.definitions import EncoderItemSpec, GraphKey
from vllm_encoder_cg.observability.trace import TraceHeader, TracePath
from vllm_encoder_cg.observability.trace_writer import TraceWriter
from vllm_encoder_cg.planning.cost_file import CostFile, MeasuredEncoder, write_costs
from vllm_encoder_cg.planning.costs import MeasuredCosts
from vllm_encoder_cg.settings import CompilationFields

HEADER = {
    "format": "vllm-encoder-cg-trace",
    "version": 1,
    "architecture": "Qwen3VLForConditionalGeneration",
    "min_tokens": 64,
    "max_tokens": 8192,
    "paths": {"default": {"granularity": 1, "budgets": [64, 128, 8192]}},
    "max_items": 16,
    "memory_bytes": 2**31,
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_encoder_cg", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        # Python's, without the COLUMNS that readline adds behind its back.
        env=dict(os.environ),
    )


def flag(output: str, name: str) -> Any:
    """The value of a flag, as a shell would pass it on."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"--{name}")]
    words = shlex.split(line)
    assert len(words) == 2
    return json.loads(words[1])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    batches = [[300], [300], [100, 300], [2040], [49] * 3]
    lines = [HEADER, *({"modality": "image", "tokens": b} for b in batches)]
    file = tmp_path / "trace.17.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_trace(trace: Path, tmp_path: Path) -> None:
    results, figure = tmp_path / "plan.json", tmp_path / "plan.svg"
    result = run(
        str(trace),
        *("--max-graphs", "4", "--json", str(results), "--plot", str(figure)),
    )
    assert result.returncode == 0, result.stderr
    config = flag(result.stdout, "compilation-config")
    assert config["encoder_cudagraph_token_budgets"] == [147, 300, 400, 2040]
    # The manager takes it.
    read = CompilationFields.from_compilation_config(SimpleNamespace(**config))
    assert read.max_items == 8 <= read.token_budgets[0]
    content = json.loads(results.read_text())
    assert content["compilation_config"] == config
    ladders = {entry["name"]: entry for entry in content["ladders"]}
    assert set(ladders) == {
        "proposed",
        "as recorded",
        "fine (the default)",
        "power of two",
    }
    assert ladders["proposed"]["padding"] == 0.0
    assert ladders["proposed"]["padding"] < ladders["power of two"]["padding"]
    assert ladders["as recorded"]["memory_gib"] == pytest.approx(2.0)
    for name in ladders:
        assert name in result.stdout
    assert "5 batches were recorded: too few" in result.stdout
    assert "<svg" in figure.read_text()


def test_ranks_share_the_items(trace: Path) -> None:
    """A batch is one, whatever the number of ranks that have a share of it."""
    result = run(str(trace), "--max-graphs", "4", "--ranks", "2", "--json", "-")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["ranks"] == 2
    proposed = content["ladders"][0]
    # Of 5 batches, two have more than one item.
    assert proposed["replays_per_batch"] == 7 / 5
    assert proposed["hit_rate"] == 1.0


def test_what_a_server_recorded(tmp_path: Path) -> None:
    """Two processes wrote; one pattern names both files."""
    header = TraceHeader(
        format="vllm-encoder-cg-trace",
        version=1,
        architecture="DeepseekOCRForCausalLM",
        min_tokens=273,
        max_tokens=8192,
        paths={"global": TracePath(granularity=273), "local": TracePath(100)},
    )
    page = EncoderItemSpec(7000, 880, {"global": 273, "local": 600})
    icon = EncoderItemSpec(1000, 273, {"global": 273, "local": 0})
    for batch in ([page], [page, icon]):
        writer = TraceWriter(str(tmp_path / "trace.jsonl"), 2**20, header)
        writer.add("image", batch)
        writer.flush()
    results = tmp_path / "plan.json"
    result = run(str(tmp_path / "trace.*.jsonl"), "--json", str(results))
    assert result.returncode == 0, result.stderr
    content = json.loads(results.read_text())
    assert content["architecture"] == "DeepseekOCRForCausalLM"
    assert content["compilation_config"]["encoder_cudagraph_token_budgets"] == [
        *(273, 546, 600)
    ]
    assert content["ladders"][0]["hit_rate"] == 1.0
    assert content["ladders"][0]["padding"] == 0.0


def test_a_mix_with_more_memory(tmp_path: Path) -> None:
    figure = tmp_path / "plan.png"
    result = run(
        "--items", "640x480*0.7,336x336*0.3", "--memory-gib", "6", "--plot", str(figure)
    )
    assert result.returncode == 0, result.stderr
    budgets = flag(result.stdout, "compilation-config")[
        "encoder_cudagraph_token_budgets"
    ]
    assert budgets == [100, 300]
    options = flag(result.stdout, "additional-config")
    assert options == {"encoder_cg": {"memory_limit_gib": 6.0}}
    assert figure.read_bytes().startswith(b"\x89PNG")


def measured_file(path: Path, architecture: str) -> Path:
    encoder = MeasuredEncoder(
        **dict.fromkeys(MeasuredEncoder.model_fields, "x")
        | {"architecture": architecture, "ranks": 1}
    )
    costs = MeasuredCosts(
        {GraphKey("default", 64): 2.0, GraphKey("default", 8192): 130.0},
        {"default": {64: 14.0, 8192: 135.0}},
    )
    content = CostFile.of(
        encoder,
        costs,
        None,
        fused=True,
        graphs=2,
        largest_budget=8192,
        memory_bytes=2**31,
    )
    write_costs(path, content)
    return path


def test_times_from_a_cost_file(trace: Path, tmp_path: Path) -> None:
    costs = measured_file(tmp_path / "costs.json", HEADER["architecture"])
    result = run(str(trace), "--cost-file", str(costs))
    assert result.returncode == 0, result.stderr
    assert "ms per" in result.stdout


def test_costs_of_another_model(trace: Path, tmp_path: Path) -> None:
    costs = measured_file(tmp_path / "costs.json", "InternVLChatModel")
    result = run(str(trace), "--cost-file", str(costs))
    assert result.returncode == 2
    assert "measured with InternVLChatModel" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either TRACE files"),
        (("no-such-trace.jsonl",), "no trace file at"),
        (("x.jsonl", "--items", "100"), "give either TRACE files"),
        (("--items", "12y"), "items: got '12y'"),
        (("--items", "12", "--memory-gib", "0"), "memory-gib: got 0.0"),
        (("--items", "12", "--plot", "figure.pdf"), "plot: got figure.pdf"),
        (("--items", "12", "--plot", "/no/where.png"), "plot: there is no folder /no"),
        (("--items", "12", "--cost-file", "no.json"), "cost-file: there is no file"),
        (("--items", "12", "--min-tokens", "9", "--max-tokens", "4"), "min-tokens"),
        (("--items", "99", "--min-tokens", "9", "--max-tokens", "9"), "no graph helps"),
        (("--items", "99", "--largest", "9999999"), "memory-gib: got"),
        (("--items", "9", "--items-per-batch", "1001"), "--items-per-batch"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
