# SPDX-License-Identifier: Apache-2.0
"""How long the phases of a start-up took."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds of phases that follow each other, from the construction on."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """By phase, in order."""

    def lap(self, phase: str) -> None:
        """Ends a phase; what follows belongs to the next."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def total(self) -> float:
        """Of all phases that have ended."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {s:.1f} s" for name, s in self.seconds.items())
        return f"{self.total:.1f} s ({phases})"
