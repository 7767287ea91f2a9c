# SPDX-License-Identifier: Apache-2.0
"""How much later than the first each rank begins a batch.

A rank that has its share done waits in the exchange for those that began later.
vLLM sends the pixels of large batches to one process after another, so that the
same ranks are late every time, by a good part of what encoding takes.  The next
batches are shared so that all *end* together.

Everything here follows from what all ranks know, so that all expect the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

WINDOW = 8
"""Batches that are looked back on."""
ENOUGH = 3
"""Of them there must be so many."""


class RankDelays:
    """What the last batches let expect of the next.

    Expected is a delay that three of four batches had at least, so that a rank which
    is late now and then, or by turns with others, is not taken for late: giving a
    punctual rank too little costs as much as giving a late one too much.

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
                all leave together; negative: that rank cannot tell yet, so its device
                is behind its host, and no host was late enough to matter.
            work_ms: what all items of the batch weigh together; 0: there is nothing to
                note.
        """
        if not work_ms > 0:
            return
        if min(elapsed_ms) < 0:
            elapsed_ms = [0.0] * self._ranks
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
            usual = _lower_quartile(late[rank] for late, _ in self._seen)
            share = _lower_quartile(late[rank] / work for late, work in self._seen)
            delays.append(min(usual, share * work_ms))
        first = min(delays)
        return [delay - first for delay in delays]


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]
