# SPDX-License-Identifier: Apache-2.0
"""The script for several GPUs, on the CPU at small sizes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.mm_processor import engines
from benchmarks.multi_gpu import __main__ as script
from benchmarks.multi_gpu import bench_processor, on_ranks
from benchmarks.multi_gpu.__main__ import main, parse_arguments
from benchmarks.multi_gpu.results import (
    NOT_BEGUN,
    Results,
    Row,
    TimeLimit,
    describe,
    is_wrong,
)
from benchmarks.multi_gpu.setup import Encoder
from benchmarks.multi_gpu.tokens import Engine, list_engines, rows_of

ARCHITECTURE = "InternVLChatModel"


def read(folder: Path, ranks: int, part: str) -> list[Row]:
    lines = (folder / f"multi-gpu-{ranks}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["part"] == part]


def test_checks_and_times_an_encoder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(
        f"--ranks 2 --vision small --output {tmp_path} --parts correctness timing "
        f"--architectures {ARCHITECTURE} --modes data --backends TORCH_SDPA "
        "--batches 1 --rounds 3".split()
    )
    lines = capfd.readouterr().out.splitlines()
    assert code == 0, lines
    (checked,) = read(tmp_path, 2, "correctness")
    assert checked["problems"] == [] and checked["error"] < 1e-4
    assert checked["replayed"] > 0 and checked["eager"] > 0
    timed = read(tmp_path, 2, "timing")
    ways = [row["way"] for row in timed if "way" in row]
    assert ways == ["eager", "ours, budgets of in-tree", "ours"]
    assert {row["exchange"] for row in timed if "exchange" in row} >= {
        "vote",
        "all_gather, equal",
    }
    # Ranks print these, to where the first process that ranks were made of did.
    assert describe(checked).endswith("right")
    assert all("P99" in describe(row) for row in timed if "way" in row)
    assert lines[-1].startswith("verdict: ok: 1 of correctness, ")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: with fewer than ranks, parts are left out."""
    monkeypatch.setattr(script, "count_gpus", lambda: 0)


def add_a_row(
    part: str, ranks: int, options: Any, results: Results, limit: TimeLimit
) -> None:
    """In place of running a part."""
    timed = {"encoder": "some", "way": "ours", "mean_ms": 1.0, "p99_ms": 2.0}
    results.add({"part": part, **timed})


def test_ranks_that_share_a_gpu_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "count_gpus", lambda: 1)
    monkeypatch.setattr(script, "run_part", add_a_row)
    code = main(["--ranks", "2", "--output", str(tmp_path)])
    assert code == 1
    assert [row["encoder"] for row in read(tmp_path, 2, "correctness")] == ["some"]
    output = capsys.readouterr().out
    for part in ("timing", "mm-processor", "tokens"):
        assert f"{part}, all of it: needs 2 GPUs, not 1" in output


def test_a_part_that_fails_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(part: str, *arguments: Any) -> None:
        add_a_row(part, *arguments)
        if part == "correctness":
            raise RuntimeError("no such GPU")

    monkeypatch.setattr(script, "run_part", run_part)
    code = main(["--ranks", "3", "--output", str(tmp_path)])
    output = capsys.readouterr().out
    assert code == 1
    assert "correctness, the rest: RuntimeError: no such GPU" in output
    assert output.count("some, ours") == 4  # that of the failed part, too
    assert "verdict: 1 PROBLEMS: correctness, the rest: Runtime" in output
    assert len(read(tmp_path, 3, "correctness")) == 2


def test_asked_to_end_it_tells_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(part: str, *_: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(script, "run_part", run_part)
    assert main(["--ranks", "3", "--output", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "correctness, the rest: ended"
    assert lines[-1].startswith("verdict: 4 PROBLEMS: correctness, the rest: ended")


def test_what_there_is_no_time_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "run_part", lambda *_: pytest.fail("begun"))
    code = main(["--ranks", "3", "--output", str(tmp_path), "--limit-s", "1"])
    assert code == 1
    output = capsys.readouterr().out
    for part in script.PARTS:
        assert f"{part}, all of it: {NOT_BEGUN}" in output


def test_a_part_without_any_result_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "run_part", lambda *_: None)
    assert main(["--ranks", "3", "--output", str(tmp_path), "--parts", "timing"]) == 1


def test_encoders_behind_one_that_fails_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_encoder_cg.samples import rank_processes

    encoders = [Encoder("A", mode) for mode in ("one", "two", "three")]
    results = Results(tmp_path / "rows.jsonl")
    starts = []

    def run_on_ranks(
        function: Any, size: int, left: list[Encoder], *_: Any, **options: Any
    ) -> None:
        starts.append([encoder.mode for encoder in left])
        for encoder in left:
            if encoder.mode == "two":
                raise rank_processes.RankError("rank 1 ended")
            results.add({"part": "p", "step": "", "encoder": str(encoder), **WELL})

    monkeypatch.setattr(rank_processes, "run_on_ranks", run_on_ranks)
    limit = TimeLimit(100, 100)
    on_ranks.run_encoders("p", lambda: None, 2, encoders, results, limit)
    assert starts == [["one", "two", "three"], ["three"]]
    first, second, third = results.rows()
    assert first["encoder"].startswith("A, one") and third["encoder"].startswith(
        "A, three"
    )
    assert second["step"].startswith("A, two") and second["problems"] == [
        "rank 1 ended"
    ]


WELL = {"problems": []}


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
        "engine": "V1, data",
        "equal_tokens": False,
        "equal_prompts": "3 of 4 prompts",
        "graphs_by_rank": [4, 0],
        "hits_by_rank": [9, 0],
        "problems": ["a rank has no graphs"],
    }
    line = describe(row)
    assert (
        "OTHER TOKENS in 3 of 4 prompts; graphs by rank [4, 0], hits [9, 0]; a" in line
    )
    exchange = {"exchange": "vote", "us": 81.4, "chosen": True}
    assert describe(exchange).split() == ["vote", "81", "us", "(chosen)"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--ranks", "-1"),
        ("--rounds", "1"),
        ("--limit-s", "0"),
        ("--step-limit-s", "-1"),
    ],
)
def test_a_wrong_number_is_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([option, value])
    assert f"{option}: got {value}" in capsys.readouterr().err.replace(".0;", ";")


def test_vllm_needs_no_multicast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in script.ENVIRONMENT:
        monkeypatch.setenv(name, "of the user")
        monkeypatch.delenv(name)
    monkeypatch.setattr(script, "run_part", lambda *_: None)
    main(["--ranks", "3", "--output", str(tmp_path)])
    assert all(os.environ[name] == "0" for name in script.ENVIRONMENT)


# -- Engines -----------------------------------------------------------------------


def test_as_few_engines_as_show_it() -> None:
    engines = list_engines(4, "small")
    names = [engine.name for engine in engines]
    assert names == [
        "V1, data",
        "V1, data, without the flag",
        "V1, stages",
        "V1, weights",
    ]
    stages = engines[2]
    assert stages.arguments["pipeline_parallel_size"] == 2
    assert stages.arguments["tensor_parallel_size"] == stages.encoding_ranks == 2
    graphs = [
        engine.arguments["compilation_config"].get("cudagraph_mm_encoder", False)
        for engine in engines
    ]
    assert graphs == [True, False, True, True]


def found(graphs: list[int], tokens: list[list[int]] | None = None) -> dict[str, Any]:
    stats = [
        {"num_budgets": count, "graph_hits": count, "items": 9} if count else None
        for count in graphs
    ]
    tokens = tokens or [[1], [2]]
    return {"tokens": tokens, "tokens_of_own_path": [[1], [2]], "stats": stats}


@pytest.mark.parametrize(
    ("graphs", "tokens", "problem"),
    [
        ([5, 5, 0, 0], None, None),
        ([5, 0, 0, 0], None, "a rank that encodes has no graphs"),
        ([5, 5, 5, 0], None, "a stage that encodes nothing has graphs"),
        ([5, 5, 0, 0], [[1], [3]], "equal in 1 of 2"),
    ],
)
def test_what_is_wrong_with_an_engine(
    graphs: list[int], tokens: list[list[int]] | None, problem: str | None
) -> None:
    engine = Engine("V2", "stages", {}, {}, True, 2)
    (row,) = rows_of(engine, {engine.name: found(graphs, tokens)})
    assert is_wrong(row) == (problem is not None)
    if tokens is None:
        assert row["problems"] == ([problem] if problem else [])
    else:
        assert row["equal_prompts"] == "1 of 2 prompts"


@pytest.mark.parametrize("flag_last", [True, False])
def test_an_engine_without_the_flag_is_compared_when_both_are_there(
    flag_last: bool,
) -> None:
    pair = [Engine("V1", "data", {}, {}, graphs, 2) for graphs in (False, True)]
    results: dict[str, dict[str, Any]] = {}
    rows = []
    for engine in pair if flag_last else reversed(pair):
        results[engine.name] = found([5, 5] if engine.graphs else [0, 0])
        rows += list(rows_of(engine, results))
    assert sorted(row["engine"] for row in rows) == [
        "V1, data",
        "V1, data, against one without the flag",
    ]
    assert not any(map(is_wrong, rows))


@pytest.mark.parametrize("seconds", [100, 1])
def test_ways_of_a_backend_start_together(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails does not end the others."""
    events: list[str] = []

    @contextlib.contextmanager
    def started(
        commands: Mapping[str, list[str]], environments: Any, folder: Path
    ) -> Iterator[list[Any]]:
        for way, command in commands.items():
            assert str(folder / way / "results.json") in command
        events.append("start " + " ".join(commands))
        yield [SimpleNamespace(way=way) for way in commands]
        events.append("end")

    def measure(engine: Any, limit_s: float) -> dict[str, Any]:
        events.append(engine.way)
        if engine.way == "in-tree":
            raise RuntimeError("no graphs")
        forward = {"mean_encoder_forward_ms": 1.0, "p99_encoder_forward_ms": 2.0}
        return {"prompts": 5, **forward}

    monkeypatch.setattr(bench_processor, "make_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(bench_processor, "started", started)
    monkeypatch.setattr(engines, "wait_until_ready", lambda *_: None)
    monkeypatch.setattr(engines, "measure", measure)
    results, limit = Results(tmp_path / "rows.jsonl"), TimeLimit(seconds, 100)
    bench_processor.bench_mm_processor(
        2, "small", ["A", "B"], tmp_path, 5, 512, results, limit
    )
    rows = results.rows()
    if limit.is_up:
        assert events == []
        assert [row["problems"] for row in rows] == [[NOT_BEGUN]] * 6
        return
    assert events == ["start ours in-tree eager", "ours", "in-tree", "eager", "end"] * 2
    assert [row.get("way") or row["step"] for row in rows[:3]] == [
        "ours",
        "mm-processor, A, in-tree",
        "eager",
    ]
    assert rows[0]["bench"] == "mm-processor, A" and rows[0]["requests"] == 5
