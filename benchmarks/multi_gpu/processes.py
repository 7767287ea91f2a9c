# SPDX-License-Identifier: Apache-2.0
"""Python programs in processes of their own, each with all that it starts ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.multi_gpu.results import NOT_BEGUN, TimeLimit

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
        _end(running)


class _Running:
    """A program under way, the leader of a session of its own."""

    def __init__(self, job: Job, folder: Path, limit_s: float) -> None:
        self.job = job
        self._limit_s = limit_s
        self._begin = time.monotonic()
        # A file, as a pipe is open for as long as any child of it lives.
        self._log = folder / f"{job.name.replace('/', '-')}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *job.arguments],
                env=os.environ | job.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def outcome(self) -> Outcome | None:
        """None: it has not ended yet."""
        code = self._process.poll()
        if code is None and time.monotonic() - self._begin < self._limit_s:
            return None
        _end([self])
        log = self._log.read_text(errors="replace")
        if code == 0:
            return Outcome(None, log)
        why = f"exit code {code}"
        if code is None:
            why = f"took more than {self._limit_s:.0f} s"
        return Outcome(f"{why}; its log ends with:\n{log[-3000:]}", log)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        """To it and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def wait(self) -> None:
        self._process.wait()


def _end(running: Sequence[_Running]) -> None:
    """Ends programs, and what they started and left behind."""
    asked = [each for each in running if not each.has_ended()]
    for each in asked:
        each.signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and not all(each.has_ended() for each in asked):
        time.sleep(_POLL_S)
    for each in running:
        each.signal(signal.SIGKILL)
        each.wait()
