# SPDX-License-Identifier: Apache-2.0
"""Runs one workload on an engine per way: started together, timed one by one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mm_processor.gate import GO, READY
from benchmarks.mm_processor.output import find_problem, read_results
from vllm_encoder_cg.benchmarking.programs import Program, end_all
from vllm_encoder_cg.benchmarking.scripts import python_path

_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Engine:
    """A process of ``vllm bench mm-processor``."""

    way: str
    program: Program
    folder: Path
    """With its log.txt and results.json."""
    start_s: float | None = None
    """None: not started yet."""

    def is_ready(self) -> bool:
        """Whether its engine and its requests are there, and it waits."""
        if self.start_s is None and (self.folder / READY).exists():
            self.start_s = self.program.seconds
        return self.start_s is not None


@contextlib.contextmanager
def started(
    commands: Mapping[str, Sequence[str]],
    environments: Mapping[str, Mapping[str, str]],
    folder: Path,
) -> Iterator[list[Engine]]:
    """Starts one engine per way; in the end, none is left.

    Args:
        commands: options of ``vllm``, by way.
        environments: more of the environment, by way.
        folder: receives a folder per way.
    """
    engines = []
    # Whose graphs are active stands in the log, at INFO, whatever the caller's level.
    shared = {"PYTHONPATH": python_path(_ROOT), "VLLM_LOGGING_LEVEL": "INFO"}
    try:
        for way, command in commands.items():
            of_way = folder / way
            of_way.mkdir(parents=True, exist_ok=True)
            for name in (READY, GO):
                (of_way / name).unlink(missing_ok=True)
            program = Program(
                ["-m", "benchmarks.mm_processor.gate", str(of_way), *command],
                of_way / "log.txt",
                shared | dict(environments[way]),
            )
            engines.append(Engine(way, program, of_way))
        yield engines
    finally:
        end_all([engine.program for engine in engines], 0.0)


def wait_until_ready(engines: Sequence[Engine], limit_s: float) -> None:
    """Until each is ready or has failed, `limit_s` seconds at most."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        # All of them: is_ready notes when.
        if all([each.is_ready() or each.program.has_ended for each in engines]):  # noqa: C419
            return
        time.sleep(0.1)


def measure_in_turn(
    engines: Sequence[Engine], limit_s: Callable[[], float]
) -> Iterator[tuple[str, dict[str, Any] | RuntimeError]]:
    """Per way what its engine measured, or why it did not; one that fails does not end
    the others.

    Args:
        limit_s: seconds for the common start, and then for each run.
    """
    wait_until_ready(engines, limit_s())
    for engine in engines:
        try:
            yield engine.way, measure(engine, limit_s())
        except RuntimeError as error:
            yield engine.way, error


def measure(engine: Engine, limit_s: float) -> dict[str, Any]:
    """Lets an engine go and waits for its end; what it measured.

    Raises:
        RuntimeError: it did not start, failed, took too long, or another manager's
            graphs were active; with the end of its output.
    """
    program = engine.program
    if not engine.is_ready():
        program.end()
        raise RuntimeError(f"did not start: {program.log[-3000:]}")
    (engine.folder / GO).touch()
    in_time = program.wait(limit_s)
    code = program.code
    program.end()  # its engine core, too, which may outlive it for a moment
    log = program.log
    if not in_time:
        raise RuntimeError(f"took more than {limit_s:.0f} s: {log[-3000:]}")
    if code:
        raise RuntimeError(f"exit code {code}: {log[-3000:]}")
    if problem := find_problem(engine.way, log):
        raise RuntimeError(problem)
    return read_results(engine.folder / "results.json", log) | {
        "start_seconds": engine.start_s
    }
