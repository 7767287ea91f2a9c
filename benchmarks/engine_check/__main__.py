# SPDX-License-Identifier: Apache-2.0
"""Runs whole engines on a GPU with and without encoder graphs, in both runners.

    python -m benchmarks.engine_check --out DIR [--architectures NAME ...]

For each architecture and runner (V1, V2): greedy tokens of an engine without the
flag; then of one with it, which also sleeps, wakes up, has its weights reloaded
and its graphs cleared and captured again, with the tokens compared after each; and
the memory that it reports for its graphs against the memory that clearing them
gives back.  Each engine runs in a process of its own.

Memory is judged with ``--jobs 1``: other engines on the GPU would be counted.
``--only-graphs`` leaves out the engines without the flag, and compares with the
tokens before the first of those changes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.engine_check.engine import run_engine
from benchmarks.engine_check.rows import describe, memory_problems, name_of, rows_of
from vllm_encoder_cg.benchmarking.programs import Program, end_all
from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
    python_path,
    write_json,
)

STUCK_S = 120.0
"""An engine that takes longer says where it is."""
LIMIT_S = 500.0
"""One that takes longer is ended."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--architectures", nargs="+", default=["Qwen3VLForConditionalGeneration"]
    )
    parser.add_argument("--runners", nargs="+", default=["V1", "V2"])
    parser.add_argument("--backend", default=None)
    parser.add_argument("--vision", choices=("small", "released"), default="released")
    parser.add_argument("--jobs", type=int, default=4, help="engines at a time")
    parser.add_argument("--only-graphs", action="store_true")
    add_time_limit(parser)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        faulthandler.dump_traceback_later(STUCK_S)  # to its log
        job = json.loads(args.engine)
        write_json(Path(job["output"]), run_engine(job))
        # vLLM's threads must not keep a finished process.
        sys.stdout.flush()
        os._exit(0)
    prepare_environment()
    args.out.mkdir(parents=True, exist_ok=True)
    attempts = Attempts(args.stop_after)
    jobs = [
        {
            "architecture": architecture,
            "runner": runner,
            "graphs": graphs,
            "backend": args.backend,
            "vision": args.vision,
            "output": str(args.out / f"{architecture}-{runner}-{graphs}.json"),
        }
        for architecture in args.architectures
        for runner in args.runners
        for graphs in ((True,) if args.only_graphs else (False, True))
    ]
    found: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    programs: list[Program] = []

    def run_job(job: dict[str, Any]) -> None:
        """Several at a time: a row is written once both of its engines are done."""
        if not attempts.in_time():
            attempts.problems.append(f"{name_of(job)}: not begun, no time left")
            return
        found[name_of(job)] = run_in_process(job, programs)
        rows[:] = rows_of(found, only_graphs=args.only_graphs)
        write_json(args.out / "engines.json", rows)

    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            list(pool.map(run_job, jobs))
        except SystemExit:  # asked to end: what there is is told
            attempts.begin_no_more()
            end_all(programs, grace_s=1.0)
            attempts.problems.append("ended before all engines had run")
    for row in rows:
        if args.jobs == 1:
            row["problems"] += memory_problems(row.get("memory"))
        print(json.dumps(row), flush=True)
        attempts.problems += [f"{row['runner']}: {each}" for each in row["problems"]]
    write_json(args.out / "engines.json", rows)
    return attempts.finish(
        "; ".join(map(describe, rows)) or "no engine with graphs and one without ran"
    )


def run_in_process(job: dict[str, Any], programs: list[Program]) -> dict[str, Any]:
    """Runs one engine in a process of its own; returns what it found.

    Args:
        programs: receives the process.
    """
    environment = {
        "PYTHONPATH": python_path(Path(__file__).resolve().parents[2]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(job["runner"] == "V2")),
    }
    output = Path(job["output"])
    output.unlink(missing_ok=True)
    found: dict[str, Any] = {"job": job, "error": None}
    program = Program(
        [
            *("-m", "benchmarks.engine_check", "--out", "."),
            *("--engine", json.dumps(job)),
        ],
        output.with_suffix(".log"),
        environment,
    )
    programs.append(program)
    in_time = program.wait(LIMIT_S)
    code = program.code
    program.end()
    if not in_time:
        return found | {"error": f"took more than {LIMIT_S:.0f} s"}
    if output.exists():
        return found | json.loads(output.read_text())
    return found | {"error": f"exit code {code}: {program.log[-1500:]}"}


if __name__ == "__main__":
    sys.exit(main())
