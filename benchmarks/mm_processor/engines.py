# SPDX-License-Identifier: Apache-2.0
"""Runs one workload on an engine per way: started together, timed one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mm_processor.gate import GO, READY
from benchmarks.mm_processor.output import find_problem, read_results
from vllm_encoder_cg.benchmarking.scripts import python_path

_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Engine:
    """A process of ``vllm bench mm-processor``."""

    way: str
    process: subprocess.Popen[bytes]
    folder: Path
    """With its log.txt and results.json."""
    begin: float = field(default_factory=time.monotonic)
    start_s: float | None = None
    """None: not started yet."""

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def is_ready(self) -> bool:
        """Whether its engine and its requests are there, and it waits."""
        if self.start_s is None and (self.folder / READY).exists():
            self.start_s = time.monotonic() - self.begin
        return self.start_s is not None

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


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
            with (of_way / "log.txt").open("wb") as log:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "benchmarks.mm_processor.gate"),
                        *(str(of_way), *command),
                    ],
                    env=os.environ | shared | environments[way],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            engines.append(Engine(way, process, of_way))
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def wait_until_ready(engines: Sequence[Engine], limit_s: float) -> None:
    """Until each is ready or has failed, `limit_s` seconds at most."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        # All of them: is_ready notes when.
        if all([engine.is_ready() or engine.has_ended() for engine in engines]):  # noqa: C419
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
    if not engine.is_ready():
        engine.kill()
        raise RuntimeError(f"did not start: {engine.log[-3000:]}")
    (engine.folder / GO).touch()
    deadline = time.monotonic() + limit_s
    while not engine.has_ended():
        if time.monotonic() > deadline:
            engine.kill()
            raise RuntimeError(f"took more than {limit_s:.0f} s: {engine.log[-3000:]}")
        time.sleep(0.1)
    code = engine.process.returncode
    engine.kill()  # its engine core, which may outlive it for a moment
    log = engine.log
    if code:
        raise RuntimeError(f"exit code {code}: {log[-3000:]}")
    if problem := find_problem(engine.way, log):
        raise RuntimeError(problem)
    return read_results(engine.folder / "results.json", log) | {
        "start_seconds": engine.start_s
    }
