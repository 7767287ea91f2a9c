# SPDX-License-Identifier: Apache-2.0
"""How much later than the first each rank begins a batch.

A rank that has its share done waits in the exchange for those that began later.
vLLM sends the pixels of large batches to one process after another, so that the
same ranks are late every time, by a good part of what encoding takes.  The next
batches are shared so that all *end* together.

Pure functions of what all ranks know, so that every rank expects the same.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

WINDOW = 8
"""Batches that are looked back on."""
ENOUGH = 3
"""Of them there must be so many."""


class RankDelays:
    """What the last batches let expect of the next.

    Expected is the median, so that a rank which is late now and then, or by turns
    with others, is not taken for late.

    Args:
        ranks: their number.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._seen: deque[tuple[list[float], float]] = deque(maxlen=WINDOW)

    def observe(self, elapsed_ms: Sequence[float], work_ms: float) -> None:
        """Notes one batch.

        Args:
            elapsed_ms: per rank, from when it began to the end of the exchange, which
                all leave together; negative: that rank does not know, and the batch
                tells nothing.
            work_ms: what all items of the batch weigh together.
        """
        if min(elapsed_ms) < 0 or work_ms <= 0:
            return
        longest = max(elapsed_ms)
        self._seen.append(([longest - each for each in elapsed_ms], work_ms))

    def expect(self, work_ms: float) -> list[float]:
        """Milliseconds per rank after the first one, for a batch that weighs `work_ms`.

        Delays grow with what is sent, and so with the work; but a rank is not
        expected to be later than it usually is, however large the batch.
        """
        if len(self._seen) < ENOUGH:
            return [0.0] * self._ranks
        delays = []
        for rank in range(self._ranks):
            usual = statistics.median(late[rank] for late, _ in self._seen)
            share = statistics.median(late[rank] / work for late, work in self._seen)
            delays.append(min(usual, share * work_ms))
        first = min(delays)
        return [delay - first for delay in delays]
