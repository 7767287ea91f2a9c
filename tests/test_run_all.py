# SPDX-License-Identifier: Apache-2.0
"""Jobs side by side on GPUs, with commands that need none."""

from __future__ import annotations

import importlib
import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.run_all import __main__ as run_all
from benchmarks.run_all.jobs import JOBS, Job, chosen_jobs
from benchmarks.run_all.scheduler import Scheduler, last_line
from vllm_encoder_cg.samples.architectures import ARCHITECTURES

FOLDER = Path(run_all.__file__).parents[1]
FOREVER = float("inf")


def python(code: str) -> str:
    """A command; ``{out}`` in it is filled in."""
    return f"-S -c '{code}'"


def noted(name: str, wait_s: float = 0.3, **more: Any) -> Job:
    """A job that writes when it ran, and where."""
    code = (
        "import os, sys, time; begin = time.time(); "
        f"time.sleep({wait_s}); "
        'print(begin, time.time(), os.environ["CUDA_VISIBLE_DEVICES"])'
    )
    return Job(name, python(code), 1.0, 60.0, **more)


def run(out: Path, *jobs: Job, cards: int = 1, limit_s: float = FOREVER) -> Any:
    """Rows by name."""
    names = [str(card) for card in range(cards)]
    rows = Scheduler(jobs, names, out, limit_s).run()
    assert json.loads((out / "results.json").read_text()) == rows
    return {row["name"]: row for row in rows}


def when(row: dict[str, Any]) -> tuple[float, float, str]:
    """Begin, end and GPUs."""
    begin, end, cards = row["found"].split()
    return float(begin), float(end), cards


def overlap(first: dict[str, Any], second: dict[str, Any]) -> bool:
    (begin, end, _), (other_begin, other_end, _) = when(first), when(second)
    return begin < other_end and other_begin < end


def test_what_is_timed_has_its_gpu_alone_and_checks_share_one(tmp_path: Path) -> None:
    checks = [noted(name, 1.0, alone=False) for name in "abcd"]
    rows = run(tmp_path, *checks, noted("timed", 0.1))
    assert [row["rc"] for row in rows.values()] == [0] * 5
    assert overlap(rows["a"], rows["b"]) and overlap(rows["b"], rows["c"])
    at_once = [name for name in "abc" if overlap(rows[name], rows["d"])]
    assert len(at_once) < 3
    assert not any(overlap(rows[name], rows["timed"]) for name in "abcd")


def test_gpus_work_side_by_side_and_one_is_kept_for_the_job_that_waits(
    tmp_path: Path,
) -> None:
    rows = run(
        tmp_path,
        noted("first", 0.8),
        noted("second", 0.2),
        noted("pair", 0.1, cards=2),
        noted("later", 0.1, alone=False),
        cards=2,
    )
    assert overlap(rows["first"], rows["second"])
    assert {when(rows["first"])[2], when(rows["second"])[2]} == {"0", "1"}
    assert set(when(rows["pair"])[2].split(",")) == {"0", "1"}
    # GPU 1 was free before, but both are kept for the pair.
    assert when(rows["later"])[0] > when(rows["pair"])[1]


def test_failures_are_told_and_do_not_end_the_others(tmp_path: Path) -> None:
    code = 'print("verdict: 2 PROBLEMS: bad"); print("bye"); raise SystemExit(3)'
    late = "import time; print(7, flush=True); time.sleep(60)"
    rows = run(
        tmp_path,
        Job("fails", python(code), 1, 60),
        Job("late", python(late), 1, 0.5),
        Job("pair", python("pass"), 1, 60, cards=2),
        noted("right", 0.0),
    )
    assert rows["fails"]["rc"] == 3 and rows["fails"]["failed"]
    assert rows["fails"]["found"] == "2 PROBLEMS: bad"
    assert rows["late"]["failed"] and rows["late"]["rc"] < 0
    assert rows["late"]["found"].startswith("ended after")
    assert rows["late"]["found"].endswith("; 7")
    assert rows["pair"]["found"] == "skipped: needs 2 GPUs"
    assert not rows["pair"]["failed"] and not rows["right"]["failed"]
    assert "bye" in (tmp_path / "fails" / "log.txt").read_text()
    table = run_all.table(list(rows.values()))
    assert "| **fails** | 3 |" in table and "| right | 0 |" in table


def test_the_limit_for_all_ends_what_runs_and_begins_nothing_more(
    tmp_path: Path,
) -> None:
    begin = time.monotonic()
    wait = "import sys, time; print(sys.argv[1], flush=True); time.sleep(60)"
    rows = run(
        tmp_path,
        Job("runs", python(wait) + " {seconds}", 1, 60),
        Job("waits", python("pass"), 30, 60),
        limit_s=1.0,
    )
    assert time.monotonic() - begin < 15
    assert rows["runs"]["found"].endswith("; 1"), "as many seconds as there are"
    assert rows["waits"]["rc"] is None and rows["waits"]["failed"]
    assert rows["waits"]["found"].startswith("not begun")


def test_a_job_leaves_nothing_running(tmp_path: Path) -> None:
    child = f'import time; time.sleep(1.5); open(r"{tmp_path}/alive", "w")'
    (tmp_path / "script.py").write_text(
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    )
    run(tmp_path, Job("leaves", str(tmp_path / "script.py"), 1, 60))
    time.sleep(2)
    assert not (tmp_path / "alive").exists()


def test_the_last_verdict_is_what_was_found() -> None:
    for text, found in (
        ("", ""),
        ("a\n\n", "a"),
        ("verdict: ok: 3 of 3\nshutting down\n", "ok: 3 of 3"),
    ):
        assert last_line(text) == found


class TestJobs:
    def test_names_are_unique_and_commands_can_be_filled_in(self) -> None:
        assert len({job.name for job in JOBS}) == len(JOBS)
        for job in JOBS:
            assert "{" not in job.command.format(out="o", seconds=1)
            assert job.expected_s < job.limit_s <= 580, job.name

    @pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
    def test_the_script_takes_its_arguments(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        class Parsed(Exception):
            pass

        def parsed(*args: Any, **kwargs: Any) -> None:
            raise Parsed

        words = shlex.split(job.command.format(out=tmp_path, seconds=100))
        names = [word.partition(":")[0] for word in words if not word.isupper()]
        architectures = [name for name in names if name[:1].isupper()]
        assert set(architectures) <= set(ARCHITECTURES)
        module = words[1] if words[0] == "-m" else words[0].replace("/", ".")[:-3]
        if module == "vllm_encoder_cg":
            module = "vllm_encoder_cg.cli"
        elif (FOLDER / module.rpartition(".")[2] / "__main__.py").exists():
            module += ".__main__"
        script = importlib.import_module(module)
        first = {
            "benchmarks.step_times": "_record",
            "benchmarks.multi_gpu.__main__": "TimeLimit",
        }.get(module, "prepare_environment")
        if module == "vllm_encoder_cg.cli":
            monkeypatch.setattr("vllm_encoder_cg.cli.verify.prepare_vllm", parsed)
        else:
            monkeypatch.setattr(script, first, parsed)
        monkeypatch.setattr("sys.argv", words[1:] if words[0] == "-m" else words)
        with pytest.raises(Parsed):
            script.main()

    def test_every_script_is_run_by_a_job(self) -> None:
        scripts = {f"benchmarks/{path.name}" for path in FOLDER.glob("*.py")}
        scripts |= {
            f"-m benchmarks.{path.parent.name}" for path in FOLDER.glob("*/__main__.py")
        }
        commands = " ".join(job.command for job in JOBS)
        unused = {
            s
            for s in scripts
            if s not in commands
            and s.replace("benchmarks/", "-m benchmarks.").removesuffix(".py")
            not in commands
        }
        assert unused == {"benchmarks/record_verified.py", "-m benchmarks.run_all"}

    def test_jobs_are_chosen_by_patterns(self) -> None:
        chosen = chosen_jobs(JOBS, ["mm-*", "serve"], ["mm-wide"])
        assert {job.name for job in chosen} == {
            *("serve", "mm-mixed", "mm-twenty", "mm-flashinfer"),
        }
        with pytest.raises(ValueError, match="no job is named 'mmm'"):
            chosen_jobs(JOBS, [], ["mmm"])

    def test_they_are_listed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_all.main(["--list", "--only", "check-*"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 + 4
        assert lines[2].startswith("| check-triton | shared | 250 |")

    def test_without_a_gpu_there_is_nothing_to_run(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(run_all, "visible_gpus", list)
        with pytest.raises(SystemExit):
            run_all.main([])
        assert "--gpus: all asked for, 0 found" in capsys.readouterr().err
