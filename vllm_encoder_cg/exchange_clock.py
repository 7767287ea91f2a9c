# SPDX-License-Identifier: Apache-2.0
"""How long before the end of a batch's exchange this rank began the batch.

All ranks leave the exchange together, so that the difference between two ranks'
times is by how much one began later, whatever their clocks show.  On a GPU it is
the device's time: a host that is late while its GPU is still busy delays nothing.
"""

from __future__ import annotations

import time

import torch

UNKNOWN = -1
_LONGEST_US = 10**12
"""Longer than any batch, and small enough for what ranks exchange."""


class ExchangeClock:
    """Times each batch, and tells of it before the next.

    Nothing raises: a rank that cannot tell the time says so, and does what the others
    do.

    Args:
        device: of the encoder.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
        self._times = [0.0, 0.0]
        self._begun = self._ended = False

    def begin(self) -> None:
        """A batch begins; what was not asked about the last one is lost."""
        self._ended = False
        self._begun = self._mark(0)

    def end(self) -> None:
        """Its exchange is launched, or has ended on a CPU."""
        self._ended = self._begun and self._mark(1)

    def _mark(self, which: int) -> bool:
        if self._events is None:
            self._times[which] = time.perf_counter()
            return True
        try:
            self._events[which].record()
        except RuntimeError:
            return False
        return True

    def elapsed_us(self) -> int:
        """Microseconds of the last batch; ``UNKNOWN``: it came to no end, or the
        device has not done it yet."""
        if not self._ended:
            return UNKNOWN
        if self._events is None:
            begin, end = self._times
            return _whole(1e6 * (end - begin))
        first, last = self._events
        try:
            return _whole(1e3 * first.elapsed_time(last)) if last.query() else UNKNOWN
        except RuntimeError:
            return UNKNOWN


def _whole(us: float) -> int:
    return round(us) if 0 <= us < _LONGEST_US else UNKNOWN
