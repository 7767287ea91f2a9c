# SPDX-License-Identifier: Apache-2.0
"""What benchmarks time, count and write.  Times themselves are not asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.encoders import Encoders
from vllm_encoder_cg.benchmarking.cases import (
    STANDARD_CASES,
    BenchCase,
    parse_cases,
)
from vllm_encoder_cg.benchmarking.encoder import (
    BenchSettings,
    EncoderBenchmark,
    EncoderTimer,
    GraphCost,
    bench_encoder,
    growth_points,
)
from vllm_encoder_cg.benchmarking.floor import _adapter_forwards
from vllm_encoder_cg.benchmarking.in_tree import pack_as_reference
from vllm_encoder_cg.benchmarking.plots import write_plots
from vllm_encoder_cg.benchmarking.report import (
    CPU_NOTE,
    markdown,
    table_rows,
    write_report,
)
from vllm_encoder_cg.benchmarking.timing import CaseTimes, summarize, time_in_turn
from vllm_encoder_cg.samples.encoder_inputs import image_batch
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification_cases import images

QWEN3 = "Qwen3VLForConditionalGeneration"
KIMI = "KimiVLForConditionalGeneration"
QUICK = BenchSettings(rounds=3, limit_s=0.0)
ABOUT = {
    "architecture": "Model",
    "backend": "FLASH_ATTN",
    "captured": "vLLM's forward",
    "device": "GPU",
    "dtype": "bfloat16",
    "vllm": "0.33.0",
    "torch": "2.11",
    "vllm_encoder_cg": "0.1.0",
}


def times(case: str, tokens: int, items: int = 1, **median_ms: float) -> CaseTimes:
    named = {name.replace("_", "-"): ms for name, ms in median_ms.items()}
    return CaseTimes(case, items, tokens, named, dict(named), {"ours": 0.125})


def made_up() -> EncoderBenchmark:
    fast = times("a", 100, eager=10.0, ours=2.0, in_tree=4.0, floor=1.0)
    slow = times("b", 900, eager=10.0, ours=8.0, in_tree=8.0)
    fast.floor_kind = "vLLM's forward"
    growth = [
        times(f"{n} x", tokens, n, eager=5.0, ours=4.0)
        for n in (1, 4)
        for tokens in (64, 256)
    ]
    costs = {"ours": GraphCost(41, 3 * 2**30, 3.5), "in-tree": GraphCost(9, 2**32, 0.5)}
    return EncoderBenchmark(dict(ABOUT), costs, [fast, slow], growth)


@pytest.mark.parametrize("architecture", [QWEN3, "MiniCPMV2_6"])
def test_an_encoder_on_the_cpu(encoders: Encoders, architecture: str) -> None:
    manager = encoders.get(architecture).manager
    before = manager.observer
    seen: list[str] = []
    cases = (BenchCase("two", images((64, 64), (112, 64))),)
    result = bench_encoder(manager, cases, QUICK, on_progress=seen.append)
    (row,) = result.cases
    assert seen == ["two"]
    assert set(row.median_ms) == set(row.p99_ms) == {"eager", "ours"}
    assert row.items == 2 and row.tokens > 1
    assert 0.0 <= row.padding["ours"] < 1.0
    assert manager.observer is before
    records = result.records()
    assert [record["way"] for record in records] == ["eager", "ours"]
    assert records[1]["graph_graphs"] == len(manager._graphs.graphs)
    json.dumps(records)


@pytest.mark.parametrize(
    "architecture",
    [QWEN3, "Qwen2_5_VLForConditionalGeneration", "MiniCPMV2_6", "InternVLChatModel"],
)
def test_the_floor_holds_exactly_the_batch(
    encoders: Encoders, architecture: str
) -> None:
    """What is captured on a GPU computes what eager does, and no row more than its
    shape needs."""
    adapter = encoders.get(architecture).manager.adapter
    batch = adapter.parse(image_batch(adapter, [(64, 64), (300, 130), (64, 64)], 0))
    assert batch is not None
    (path,) = adapter.config().paths
    with torch.inference_mode():
        rows = [forward() for forward in _adapter_forwards(adapter, batch)]
        groups: dict[Any, list[int]] = {}
        for i, spec in enumerate(batch.specs):
            groups.setdefault(spec.axis_keys, []).append(i)
        for output, indices in zip(rows, groups.values(), strict=True):
            expected = adapter.eager(batch, indices, path)
            assert relative_norm(output[: len(expected)], expected) < 1e-4
            if architecture == QWEN3:
                assert len(output) == len(expected)


def test_growth_cases_have_the_tokens_asked_for(encoders: Encoders) -> None:
    timer = EncoderTimer(encoders.get(QWEN3).manager, QUICK)
    for items, tokens in ((1, 64), (4, 64), (4, 1024)):
        case = timer.growth_case(items, tokens)
        assert case is not None
        row = timer.time_case(case)
        assert row.items == items
        assert row.tokens == pytest.approx(tokens, rel=0.25)


def test_growth_points() -> None:
    assert growth_points(300) == [(1, 64), (4, 64), (16, 64)] + [
        (items, 256) for items in (1, 4, 16, 64)
    ]
    assert max(growth_points(16384)) == (64, 16384)


def test_every_way_is_called_alike() -> None:
    calls = {"a": 0, "b": 0}

    def call(name: str) -> Any:
        def count() -> None:
            calls[name] += 1

        return count

    ways = {name: call(name) for name in calls}
    measured = time_in_turn(ways, torch.device("cpu"), rounds=4, warmup=2)
    assert calls == {"a": 6, "b": 6}
    row = summarize("case", 1, 10, measured)
    assert len(measured["a"]) == 4
    assert row.median_ms["a"] <= row.p99_ms["a"]
    assert row.ratio("a", to="a") == 1.0


def test_slow_cases_have_three_rounds() -> None:
    measured = time_in_turn(
        {"a": lambda: None}, torch.device("cpu"), rounds=50, limit_s=0.0
    )
    assert len(measured["a"]) == 3


def test_the_reference_packs_smallest_first() -> None:
    budgets = (64, 128, 256)
    assert pack_as_reference([100, 30, 20], budgets, 8) == [(150, 256)]
    assert pack_as_reference([200, 30, 30], budgets, 8) == [(60, 64), (200, 256)]
    assert pack_as_reference([10] * 5, budgets, 2) == [(20, 64)] * 2 + [(10, 64)]
    assert pack_as_reference([300], budgets, 8) == []


def test_tables_have_our_ratios() -> None:
    columns, cells = table_rows(made_up().cases)
    by_case = {line[0]: dict(zip(columns, line, strict=True)) for line in cells}
    assert by_case["a"]["ours / eager"] == "0.200"
    assert by_case["b"]["ours / floor"] == ""
    assert by_case["worst"]["ours / in-tree"] == "1.000"
    assert by_case["geometric mean"]["ours / in-tree"] == "0.707"
    assert by_case["worst"]["ours / floor"] == "2.000"
    assert by_case["a"]["padding"] == "12.5%"


def test_reports_and_figures(tmp_path: Path) -> None:
    figures = write_plots(tmp_path, [made_up()])
    written = figures + write_report(tmp_path, [made_up()], "the command", figures)
    assert {path.name for path in written} == {
        "summary.json",
        "README.md",
        "Model-FLASH_ATTN-latency.png",
        "Model-FLASH_ATTN-padding.png",
        "Model-FLASH_ATTN-growth.png",
        "memory.png",
    }
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "README.md").read_text()
    assert "the command" in text
    assert markdown(made_up()) in text
    assert "(Model-FLASH_ATTN-latency.png)" in text
    assert "ours: 41 graphs, 3.00 GiB, 3.5 s" in text
    assert CPU_NOTE not in text
    on_cpu = made_up()
    on_cpu.about["device"] = "cpu"
    assert CPU_NOTE in markdown(on_cpu)


def test_vllm_plots_the_records(tmp_path: Path) -> None:
    from vllm.benchmarks.sweep.plot import PlotBinners, PlotFilters, plot

    write_report(tmp_path, [made_up()])
    plot(
        tmp_path,
        tmp_path,
        fig_by=["architecture", "backend"],
        row_by=["kind"],
        col_by=[],
        curve_by=["way"],
        var_x="tokens",
        var_y="median_encoder_forward_ms",
        filter_by=PlotFilters.parse_str("kind==cases"),
        bin_by=PlotBinners.parse_str(""),
        scale_x=None,
        scale_y=None,
        dry_run=True,
    )
    records = json.loads((tmp_path / "summary.json").read_text())
    assert all(
        value is None or isinstance(value, str | int | float)
        for record in records
        for value in record.values()
    )
    assert len(records) == 4 + 3 + 8


def test_default_cases_are_images_by_their_names() -> None:
    assert len({case.name for case in STANDARD_CASES}) == 11
    assert all(case.batch.modality == "image" for case in STANDARD_CASES)


def test_given_cases() -> None:
    first, second = parse_cases(["64x64*2,32x32", "video:4x64x64"])
    assert len(first.batch.items) == 3
    assert second.batch.modality == "video"
    with pytest.raises(ValueError, match="calls of their own"):
        parse_cases(["64x64,video:4x64x64"])


class TestCommand:
    """``vllm-encoder-cg bench``, in this process."""

    @pytest.fixture(autouse=True)
    def own_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stdout")
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        monkeypatch.setattr(sys, "argv", ["vllm-encoder-cg", "bench"])

    def test_bench(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from vllm_encoder_cg.cli.bench import bench

        bench(
            architecture=QWEN3,
            items=["64x64*2"],
            rounds=3,
            settings='{"max_graphs": 2}',
            out=tmp_path / "results",
            json=tmp_path / "records.json",
        )
        output = " ".join(capsys.readouterr().out.split())
        assert "say nothing of graphs" in output
        assert "ours / eager" in output
        records = json.loads((tmp_path / "results" / "summary.json").read_text())
        assert {record["way"] for record in records} == {"eager", "ours"}
        assert records[0]["device"] == "cpu"
        assert records == json.loads((tmp_path / "records.json").read_text())

    def test_what_no_graph_holds(self, capsys: pytest.CaptureFixture[str]) -> None:
        from vllm_encoder_cg.cli.bench import bench

        with pytest.raises(SystemExit) as end:
            bench(architecture=QWEN3, items=["512x512"], rounds=3, max_tokens=64)
        assert end.value.code == 2
        assert "no item went through a graph" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "give either --model"),
            ({"architecture": "b"}, "there is no sample of 'b'"),
            ({"architecture": QWEN3, "items": ["12"]}, "items: got '12'"),
            ({"architecture": QWEN3, "settings": "{"}, "settings: got '{'"),
            ({"architecture": QWEN3, "settings": '{"a": 1}'}, "encoder_cg.a: unknown"),
            ({"architecture": QWEN3, "dtype": "int8"}, "dtype: got 'int8'; "),
            ({"architecture": KIMI, "items": ["video:4x64x64"]}, "items: got video"),
            ({"architecture": QWEN3, "out": Path(__file__)}, "cannot be made"),
            ({"model": "/no/such/folder"}, "/no/such/folder"),
        ],
    )
    def test_wrong_arguments(
        self,
        arguments: dict[str, Any],
        message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        from vllm_encoder_cg.cli.bench import bench

        with pytest.raises(SystemExit) as end:
            bench(**arguments)
        assert end.value.code == 2
        assert message in capsys.readouterr().err
