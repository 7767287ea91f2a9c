# SPDX-License-Identifier: Apache-2.0
"""Several programs at a time, each within a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.multi_gpu.results import NOT_BEGUN, TimeLimit
from vllm_encoder_cg.benchmarking.programs import Program, end_all

_POLL_S = 0.2
_GRACE_S = 5.0
"""Between asking a process to end and ending it."""


@dataclass(frozen=True)
class Job:
    """One program."""

    name: str
    arguments: Sequence[str]
    """Of Python."""
    environment: dict[str, str] = field(default_factory=dict)
    """Beside this process's own."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    error: str | None
    """None: with exit code 0."""
    log: str = ""
    """What it and its children wrote."""


def run_jobs(
    jobs: Sequence[Job], folder: Path, limit: TimeLimit, at_once: int = 1
) -> Iterator[tuple[Job, Outcome]]:
    """Runs programs in the order given, and yields each when it has ended.

    One that takes too long is ended; leaving the iteration ends all.

    Args:
        folder: of their logs.
    """
    waiting = list(jobs)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once and not limit.is_up:
                running.append(_Running(waiting.pop(0), folder, limit.of_step))
            for each in list(running):
                if (outcome := each.outcome()) is not None:
                    running.remove(each)
                    yield each.job, outcome
            if waiting and limit.is_up and not running:
                yield waiting.pop(0), Outcome(NOT_BEGUN)
            elif running:
                time.sleep(_POLL_S)
    finally:
        end_all([each.program for each in running], _GRACE_S)


class _Running:
    """A program under way."""

    def __init__(self, job: Job, folder: Path, limit_s: float) -> None:
        self.job = job
        self._limit_s = limit_s
        log = folder / f"{job.name.replace('/', '-')}.log"
        self.program = Program(job.arguments, log, job.environment)

    def outcome(self) -> Outcome | None:
        """None: it has not ended yet."""
        code = self.program.code
        if code is None and self.program.seconds < self._limit_s:
            return None
        end_all([self.program], _GRACE_S)
        log = self.program.log
        if code == 0:
            return Outcome(None, log)
        why = f"exit code {code}"
        if code is None:
            why = f"took more than {self._limit_s:.0f} s"
        return Outcome(f"{why}; its log ends with:\n{log[-3000:]}", log)
