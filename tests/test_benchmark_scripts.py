# SPDX-License-Identifier: Apache-2.0
"""The benchmark scripts answer ``--help``, and their tables add up."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import (
    encoder_latency,
    gpu_check,
    record_verified,
    serve_check,
    step_times,
)
from benchmarks.engine_check import rows as engine_rows
from benchmarks.mm_processor import __main__ as mm_processor
from benchmarks.mm_processor import gate, tables
from benchmarks.mm_processor.workloads import command_line
from vllm_encoder_cg.benchmarking import programs
from vllm_encoder_cg.benchmarking.results import EncoderBenchmark, GraphCost
from vllm_encoder_cg.benchmarking.scripts import Attempts
from vllm_encoder_cg.benchmarking.timing import CaseTimes

FOLDER = Path(encoder_latency.__file__).parent
README = (FOLDER / "README.md").read_text()
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
PACKAGES = sorted(path.parent.name for path in FOLDER.glob("*/__main__.py"))


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    program = programs.Program(["-c", "print('no such model')"], tmp_path / "log")
    with pytest.raises(RuntimeError, match="did not start: no such model"):
        serve_check.Server(program, port=1).wait_until_ready()
    program.end()


@pytest.mark.parametrize("script", [*SCRIPTS, *PACKAGES])
def test_help_and_a_line_in_the_readme(script: str) -> None:
    by_name = (
        [str(FOLDER / script)] if script in SCRIPTS else ["-m", "benchmarks." + script]
    )
    result = subprocess.run(
        [sys.executable, *by_name, "--help"],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    named = f"benchmarks/{script}" if script in SCRIPTS else f"-m benchmarks.{script}"
    assert f"python {named}" in README


class TestEncoderLatency:
    ABOUT: ClassVar = {"architecture": "Model", "backend": "FLASH_ATTN"}

    def row(self, ours: float, **others: float) -> CaseTimes:
        times = {"ours": ours, **{k.replace("_", "-"): v for k, v in others.items()}}
        return CaseTimes("case", 1, 100, times)

    def test_overview_of_several_encoders(self) -> None:
        rows = [
            self.row(2.0, eager=4.0, floor=2.0),
            self.row(4.0, eager=4.0, floor=2.0),
        ]
        cost = GraphCost(9, 2**31, 1.5, 2**32, {"capture": 1.0, "check": 0.5})
        benchmark = EncoderBenchmark(self.ABOUT, {"ours": cost}, rows)
        table = encoder_latency._overview([benchmark])
        assert table.splitlines()[-1] == (
            "| Model-FLASH_ATTN | 1.000 |  | 1.414 (2.000) | 9 graphs, 2.00 GiB (limit "
            "4.00), 1.5 s (capture 1.0 + check 0.5) |"
        )
        assert encoder_latency.memory_problems(benchmark) == []
        assert "ours / floor 2.000 at most" in encoder_latency._verdict([benchmark])

    def test_more_memory_than_the_limit_is_a_problem(self) -> None:
        cost = GraphCost(9, 2**32, 1.5, 2**31)
        benchmark = EncoderBenchmark(self.ABOUT, {"ours": cost})
        (problem,) = encoder_latency.memory_problems(benchmark)
        assert "4.00 GiB (limit 2.00)" in problem

    def test_what_was_measured_before_a_failure_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        about = dict.fromkeys(
            ("dtype", "device", "vllm", "torch", "captured"), "x"
        ) | dict(self.ABOUT)

        def run(name: str, args: Any, report: Any, attempts: Any) -> None:
            row = self.row(2.0, eager=4.0)
            row.p99_ms = row.median_ms
            report.update(EncoderBenchmark(about | {"architecture": name}, {}, [row]))
            if name == "Second":
                raise RuntimeError("out of memory")

        def plot(folder: Path, benchmarks: list[EncoderBenchmark]) -> list[Path]:
            return [folder / f"{b.name}.png" for b in benchmarks]

        monkeypatch.setattr(encoder_latency, "run", run)
        monkeypatch.setattr(encoder_latency, "_write_plots", plot)
        monkeypatch.setattr(
            sys, "argv", ["x", "--out", str(tmp_path), "First", "Second", "Third"]
        )
        assert encoder_latency.main() == 1
        records = json.loads((tmp_path / "summary.json").read_text())
        names = [record["architecture"] for record in records]
        assert names == ["First"] * 2 + ["Second"] * 2 + ["Third"] * 2
        assert "![Third-FLASH_ATTN]" in (tmp_path / "README.md").read_text()


class TestMmProcessor:
    def options(self, way: str, workload: str = "mixed") -> list[str]:
        return list(
            command_line(
                workload,
                way,
                backend="FLASH_ATTN",
                checkpoint=Path("model"),
                output=Path("results.json"),
            )
        )

    def config(self, words: list[str]) -> dict[str, Any]:
        return json.loads(words[words.index("--compilation-config") + 1])

    def test_ways_differ_by_their_graphs_alone(self) -> None:
        eager, in_tree, ours = map(self.options, ("eager", "in-tree", "ours"))
        flag = {"cudagraph_mm_encoder": True}
        assert self.config(eager) | flag == self.config(in_tree) == self.config(ours)
        assert "cudagraph_mm_encoder" not in self.config(eager)
        at = ours.index("--additional-config")
        assert ours[:at] + ours[at + 2 :] == in_tree

    def test_a_workload_has_budgets_of_its_own(self) -> None:
        config = self.config(self.options("in-tree", "twenty"))
        assert config["encoder_cudagraph_max_vision_items_per_batch"] == 8

    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Runs a workload with Python in place of engines."""
        code = """
import json, os, pathlib, sys, time
folder, way, active = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if way == "fails":
    sys.exit("no memory")
(folder / "ready").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
begin = time.time()
time.sleep(0.2)
if active == "ours" and os.environ["VLLM_LOGGING_LEVEL"] == "INFO":
    print("vllm-encoder-cg 1.0 active for Model: 3 graphs")
    print("Encoder CUDA graphs: Items: 3, Hit rate: 66.7%")
    print("Encoder CUDA graphs: Items: 4, Hit rate: 100.0%")
forward = {"mean": 2.0, "median": 1.5, "p99.0": 9.0}
found = {"completed": 4, "mm_processor_stats": {"encoder_forward_ms": forward}}
(folder / "results.json").write_text(json.dumps(found))
(folder / "when.json").write_text(json.dumps([begin, time.time()]))
"""
        script = tmp_path / "gate.py"
        script.write_text(code)
        popen = subprocess.Popen

        def start(command: list[str], **options: Any) -> Any:
            _, _, _, folder, *rest = command
            return popen([sys.executable, str(script), folder, *rest], **options)

        monkeypatch.setattr(programs.subprocess, "Popen", start)

        def run_ways(active: dict[str, str]) -> tuple[list[Any], list[str]]:
            """What is kept of each way, and what went wrong."""
            kept: list[Any] = []
            attempts = Attempts()
            monkeypatch.setattr(
                mm_processor, "command_line", lambda n, way, **_: [way, active[way]]
            )
            args = argparse.Namespace(
                out=tmp_path, vision="small", prompts=4, timeout=30.0
            )
            mm_processor.run(
                *("mixed", "FLASH_ATTN", list(active), Path("model"), args),
                *(attempts, kept.append),
            )
            return kept, attempts.problems

        return run_ways

    def test_engines_are_timed_one_by_one(
        self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever the level of the caller's log, in which their graphs are found."""
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        kept, problems = run({"eager": "", "in-tree": "", "ours": "ours"})
        assert problems == []
        assert [record["way"] for record in kept] == ["eager", "in-tree", "ours"]
        assert [record["hit_rate_percent"] for record in kept] == [None, None, 100.0]
        assert kept[0]["p99_encoder_forward_ms"] == 9.0
        times = [
            json.loads((tmp_path / "mixed-FLASH_ATTN" / way / "when.json").read_text())
            for way in ("eager", "in-tree", "ours")
        ]
        assert times[0][1] <= times[1][0] and times[1][1] <= times[2][0]

    def test_a_run_without_our_graphs_is_no_result_of_ours(self, run: Any) -> None:
        kept, problems = run({"fails": "", "in-tree": "ours", "ours": ""})
        assert kept == []
        assert "did not start: no memory" in problems[0]
        assert "graphs are active" in problems[1]
        assert "graphs are not active" in problems[2]

    def test_the_engine_waits_for_its_turn(self, tmp_path: Path) -> None:
        chat = gate.wait_before(lambda self, prompt: 2 * prompt, tmp_path)
        (tmp_path / gate.GO).touch()
        assert chat(None, 3) == 6 and (tmp_path / gate.READY).exists()
        (tmp_path / gate.GO).unlink()
        assert chat(None, 4) == 8, "waits once"

    def test_the_table_has_what_ours_saves(self) -> None:
        def record(way: str, mean: float) -> dict[str, Any]:
            return {
                "workload": "mixed",
                "backend": "FLASH_ATTN",
                "way": way,
                "mean_encoder_forward_ms": mean,
                "p99_encoder_forward_ms": 2 * mean,
                "start_seconds": 30.0,
            }

        records = [record("eager", 8.0), record("ours", 2.0)]
        assert tables.markdown(records).splitlines()[-2:] == [
            "| mixed | FLASH_ATTN | mean | 8.00 |  | 2.00 | 0.250 |  |",
            "| mixed | FLASH_ATTN | p99 | 16.00 |  | 4.00 | 0.250 |  |",
        ]
        assert tables.verdict(records) == (
            "2 engines, ours / eager mean 0.250 at most, ours / eager p99 0.250 at "
            "most, started in 30 s at most"
        )


class TestEngineCheck:
    def found(self, graphs: bool, runner: str = "V1", **more: Any) -> dict[str, Any]:
        job = {"architecture": "Model", "runner": runner, "graphs": graphs}
        memory = {"reported": 2 * 2**30, "freed": 2.04 * 2**30}
        return {
            "job": job,
            "error": None,
            "tokens": {"first": [[1, 2], [3, 4]]},
            "seconds": 30.0,
            "memory": memory,
            "stages": {"again": "2 hits"},
            "stats": {"graph_hits": 2, "graph_misses": 0},
        } | more

    def compared(self, *found: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
        by_name = {engine_rows.name_of(each["job"]): each for each in found}
        return engine_rows.rows_of(by_name, **{"only_graphs": False} | options)

    def test_a_row_needs_both_engines(self) -> None:
        given, without = self.found(True), self.found(False)
        assert self.compared(given) == []
        (row,) = self.compared(given, without, self.found(True, "V2"))
        assert row["problems"] == [] and row["runner"] == "V1"
        assert len(self.compared(given, self.found(True, "V2"), only_graphs=True)) == 2
        assert engine_rows.describe(row) == (
            "V1: 2 hits, 1 stages, 2.00 GiB reported, 2.04 given back, started in "
            "30.0 s"
        )

    def test_other_tokens_and_engines_that_fail_are_problems(self) -> None:
        other = self.found(True, tokens={"slept": [[1, 2], [3, 5]]})
        (row,) = self.compared(other, self.found(False))
        assert row["problems"] == ["slept: 1 of 2 prompts equal"]
        (row,) = self.compared(self.found(True, error="no memory"), only_graphs=True)
        assert row["problems"] == ["no memory"]
        assert engine_rows.describe(row) == "V1 failed"

    @pytest.mark.parametrize(
        ("reported", "freed", "right"), [(100, 104, True), (100, 94, False)]
    )
    def test_memory_is_right_to_5_percent(
        self, reported: int, freed: int, right: bool
    ) -> None:
        memory = {"reported": reported, "freed": freed}
        assert (engine_rows.memory_problems(memory) == []) is right
        assert engine_rows.memory_problems(None) == ["memory was not measured"]


class TestServeCheck:
    NAMES = ("a", "b", "c", "d")
    TIE: ClassVar = {1: -0.69, 2: -0.70}

    def answer(
        self, tokens: list[int], logprobs: dict[int, float]
    ) -> serve_check.Answer:
        tokens = tokens + [0] * (serve_check.TOKENS - len(tokens))
        return serve_check.Answer(tokens, [logprobs] * serve_check.TOKENS)

    def found(self, **other: serve_check.Answer) -> dict[str, Any]:
        """Four answers without graphs, and with them `other` instead of some."""
        without = {name: self.answer([1], self.TIE) for name in self.NAMES}
        return {"without": without, "with": without | other, "metrics": {"hits": 2.0}}

    def test_answers_must_be_equal_and_by_graph(self) -> None:
        assert serve_check.problems(self.found()) == []
        (problem,) = serve_check.problems(self.found() | {"metrics": {}})
        assert problem == "no item was encoded by graph"
        found = self.found(a=serve_check.Answer([1], [self.TIE]))
        assert serve_check.problems(found) == ["a: 1 tokens with graphs instead of 12"]

    @pytest.mark.parametrize(
        "logprobs",
        [
            {1: -5.0, 2: -0.01},
            {1: -0.01, 2: -5.0},
            {2: -0.69, 3: -0.7},
            {3: -0.1},
            {1: float("nan"), 2: -0.01},
        ],
    )
    def test_a_server_that_is_surer_of_another_token_is_wrong(
        self, logprobs: dict[int, float]
    ) -> None:
        found = self.found(a=self.answer([2], logprobs))
        assert serve_check.problems(found) == ["a: other tokens with graphs"]
        name = f"a{serve_check.AT_ONCE}"
        for way, token in (("without", 1), ("with", 2)):
            found[way] = {name: self.answer([token], logprobs)}
        assert serve_check.problems(found) == []

    def test_one_tie_in_four_may_part(self) -> None:
        other = self.answer([2], {1: -0.70, 2: -0.69})
        found = self.found(a=other)
        assert serve_check.problems(found) == []
        parting = serve_check.comparisons(found)["a"]
        assert str(parting) == "a: parts at token 0, by 0.010 nats"
        (problem,) = serve_check.problems(self.found(a=other, b=other))
        assert problem == "2 of 4 answers part, if by little"

    def test_metrics_are_summed_over_labels(self) -> None:
        text = """
# HELP vllm:encoder_cudagraph_hits_total Items
vllm:encoder_cudagraph_hits_total{engine="0",model_name="m"} 3.0
vllm:encoder_cudagraph_misses_total{engine="0",reason="a"} 1.0
vllm:encoder_cudagraph_misses_total{engine="0",reason="b"} 2.0
vllm:prompt_tokens_total{engine="0"} 9.0
"""
        assert serve_check.parse_metrics(text) == {"hits": 3.0, "misses": 3.0}

    def test_requests_have_media_of_their_own(self) -> None:
        name = "Qwen3VLForConditionalGeneration"
        first = serve_check.make_requests(name, small=True)
        second = serve_check.make_requests(name, small=True, seed=100)
        assert list(first) == ["84x84", "160x120", "four images", "a video"]
        assert not any(first[name] == second[name] for name in first)


class TestGpuCheck:
    REPORT: ClassVar = {
        "inactive": None,
        "complete": True,
        "cases": [{"case": "one", "ok": True, "problems": [], "hits": 1}],
        "stats": {"dropped_graphs": []},
    }

    def test_a_right_encoder(self) -> None:
        assert gpu_check.problems(self.REPORT) == []
        assert record_verified.refusal(self.REPORT) is None

    def test_what_is_not_right_is_told_and_not_recorded(self) -> None:
        wrong = {"case": "one", "ok": False, "problems": ["differs"], "hits": 1}
        unused = {"case": "one", "ok": True, "problems": [], "hits": 0}
        for change, problem in (
            ({"cases": [wrong]}, "one: differs"),
            ({"cases": [unused]}, "nothing was replayed"),
            ({"complete": False}, "no time left for all cases"),
            ({"stats": {"dropped_graphs": ["g"]}}, "dropped: g"),
            ({"inactive": "SDPA", "cases": [], "complete": False}, "inactive: SDPA"),
        ):
            report = self.REPORT | change
            assert gpu_check.problems(report) == [problem]
            assert record_verified.refusal(report) is not None


def test_times_while_serving_and_what_they_cost() -> None:
    rows = [
        {"every": every, "seconds": 2.0, "estimate": estimate, "host_us": us}
        for every, estimate, us in ((None, 0.0, 5.0), (1, 2.1, 9.0), (16, 1.98, 5.5))
    ]
    assert len(step_times.table(rows).splitlines()) == 4
    verdict = step_times.verdict(rows)
    assert verdict == "verdict: ok: times 5.0% off at most, 0.5 us per batch"
