# SPDX-License-Identifier: Apache-2.0
"""Runs jobs side by side on GPUs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.run_all.jobs import Job
from vllm_encoder_cg.benchmarking.programs import Program, end_all
from vllm_encoder_cg.benchmarking.scripts import VERDICT, python_path, write_json

ROOT = Path(__file__).resolve().parents[2]
MOST_PER_CARD = 3
"""Checks that share a GPU: each takes up to a quarter of its memory."""
GRACE_S = 10.0
"""Between asking a job to end and ending it, in which it ends what it started."""
MARGIN_S = 15.0
"""Before its limit a job is told to begin nothing new."""


@dataclass
class Running:
    """A job that has been started."""

    job: Job
    cards: list[int]
    program: Program
    limit_s: float
    asked_to_end: float | None = None
    """When."""

    def end_if_late(self, now: float) -> None:
        if self.asked_to_end is None and self.program.seconds > self.limit_s:
            self.asked_to_end = now
            self.program.ask_to_end()
        elif self.asked_to_end is not None and now - self.asked_to_end > GRACE_S:
            self.program.kill()

    def row(self) -> dict[str, Any]:
        """What it came to."""
        seconds = self.program.seconds
        found = last_line(self.program.log)
        if self.asked_to_end is not None:
            found = f"ended after {seconds:.0f} s; {found}"
        return {
            "name": self.job.name,
            "rc": self.program.code,
            "failed": self.program.code != 0 or self.asked_to_end is not None,
            "seconds": round(seconds, 1),
            "found": found,
        }


class Scheduler:
    """Runs jobs in their order, each as soon as there is room on a GPU.

    A job for which there is none keeps the GPUs that it will get first for itself,
    so that it does not wait for ever for later ones.

    Args:
        cards: numbers of the GPUs, as ``CUDA_VISIBLE_DEVICES`` has them.
        limit_s: for all together.
    """

    def __init__(
        self, jobs: Sequence[Job], cards: Sequence[str], out: Path, limit_s: float
    ) -> None:
        self.cards = list(cards)
        self.out = out
        self.deadline = time.monotonic() + limit_s
        self.waiting = list(jobs)
        self.running: list[Running] = []
        self.rows: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        """One row per job; results.json has as many as have ended."""
        try:
            while self.waiting or self.running:
                self._drop_what_cannot_run()
                self._start_what_fits()
                time.sleep(0.05)
                self._collect()
        finally:
            end_all([running.program for running in self.running], GRACE_S)
        return self.rows

    def _drop_what_cannot_run(self) -> None:
        left = self.deadline - time.monotonic()
        for job in list(self.waiting):
            if job.cards > len(self.cards):
                self._note(job, f"skipped: needs {job.cards} GPUs", failed=False)
            elif left < min(job.expected_s, job.limit_s) / 2:
                self._note(job, f"not begun: {left:.0f} s were left", failed=True)
            else:
                continue
            self.waiting.remove(job)

    def _start_what_fits(self) -> None:
        kept: set[int] = set()
        for job in list(self.waiting):
            free = [
                card
                for card in self._by_load()
                if card not in kept and self._fits(job, card)
            ]
            if len(free) >= job.cards:
                self.running.append(self._start(job, free[: job.cards]))
                self.waiting.remove(job)
            else:
                others = [c for c in range(len(self.cards)) if c not in kept]
                kept.update(sorted(others, key=self._free_at)[: job.cards])

    def _on(self, card: int) -> list[Running]:
        return [running for running in self.running if card in running.cards]

    def _by_load(self) -> list[int]:
        """The fullest first: checks leave GPUs to what needs one alone."""
        return sorted(range(len(self.cards)), key=lambda card: -len(self._on(card)))

    def _fits(self, job: Job, card: int) -> bool:
        there = self._on(card)
        if job.alone or job.cards > 1:
            return not there
        return len(there) < MOST_PER_CARD and not any(r.job.alone for r in there)

    def _free_at(self, card: int) -> float:
        there = self._on(card)
        return max((r.program.begin + r.job.expected_s for r in there), default=0.0)

    def _start(self, job: Job, cards: list[int]) -> Running:
        folder = self.out / job.name
        folder.mkdir(parents=True, exist_ok=True)
        left = self.deadline - time.monotonic()
        limit_s = min(job.limit_s, left)
        seconds = max(1.0, limit_s - MARGIN_S)
        words = shlex.split(job.command)
        # Text of the caller's is only filled in, never split.
        words = [w.format(out=folder, seconds=f"{seconds:.0f}") for w in words]
        names = ",".join(self.cards[card] for card in cards)
        environment = {
            "CUDA_VISIBLE_DEVICES": names,
            "PYTHONPATH": python_path(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        program = Program(words, folder / "log.txt", environment, ROOT)
        print(f"{job.name}: begins on GPU {names}", flush=True)
        return Running(job, cards, program, limit_s)

    def _collect(self) -> None:
        now = time.monotonic()
        for running in list(self.running):
            if not running.program.has_ended:
                running.end_if_late(now)
                continue
            running.program.end()  # what it may have left behind
            self.running.remove(running)
            self._add(running.row())

    def _note(self, job: Job, found: str, *, failed: bool) -> None:
        self._add(
            {
                "name": job.name,
                "rc": None,
                "failed": failed,
                "seconds": 0.0,
                "found": found,
            }
        )

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(f"{row['name']}: {row['found']} ({row['seconds']:.0f} s)", flush=True)
        write_json(self.out / "results.json", self.rows)


def last_line(log: str) -> str:
    """The verdict at the end of a log, or else its last line."""
    lines = [line.strip() for line in log.splitlines()]
    lines = [line for line in lines if line]
    verdicts = [line for line in lines if line.startswith(VERDICT)]
    return (verdicts or lines or [""])[-1].removeprefix(VERDICT)[:300]
