# SPDX-License-Identifier: Apache-2.0
"""Getting small host tables and selected rows into captured buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

_TILE_ROWS = 256
"""No attention kernel here reads more rows at once."""


class HostTable:
    """An int32 table written on the host, then copied to the device at once.

    Pinned where there is a GPU, so that the copy does not hold up the host; it
    must not be written again before that copy is over.
    """

    def __init__(self, length: int) -> None:
        pinned = torch.cuda.is_available()
        self._host = torch.empty(length, dtype=torch.int32, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None
        self.array: np.ndarray = self._host.numpy()
        """``[length] int32``, to be written."""

    def copy_to(self, buffer: torch.Tensor) -> None:
        """Launches the copy into ``buffer``, of the same length."""
        buffer.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Until the last copy is over."""
        if self._copied is not None:
            self._copied.synchronize()


class HostTables:
    """Tables to write in turn, a few of every length.

    Calls that follow each other closely write different ones, so that none waits
    for the copy of the one before.
    """

    def __init__(self, per_length: int = 8) -> None:
        self._per_length = per_length
        self._rings: dict[int, deque[HostTable]] = {}

    def take(self, length: int) -> HostTable:
        """A table of `length` that may be written."""
        ring = self._rings.setdefault(length, deque())
        if len(ring) < self._per_length:
            table = HostTable(length)
        else:
            table = ring.popleft()
            table.wait()
        ring.append(table)
        return table


def copy_rows(
    source: torch.Tensor,
    offsets: Sequence[int],
    indices: Sequence[int],
    buffer: torch.Tensor,
) -> int:
    """Copies the row ranges of the chosen items next to each other.

    Ranges that are neighbours in `source` are one copy, so a batch taken whole
    and in order is a single one.

    Args:
        source: ``[rows, ...]``.
        offsets: item i has the rows ``offsets[i] : offsets[i + 1]``.
        buffer: ``[capacity rows, ...]``, written from row 0.

    Attention kernels read whole tiles of values, also beyond the last sequence,
    and multiply what does not belong to it by zero; so rows that may have been left
    not finite are cleared as far as a tile reaches.

    Returns:
        The rows written.

    Raises:
        ValueError: they are more than the buffer holds.
    """
    written = 0
    position, count = 0, len(indices)
    while position < count:
        first = last = indices[position]
        while position + 1 < count and indices[position + 1] == last + 1:
            position += 1
            last += 1
        position += 1
        start, stop = offsets[first], offsets[last + 1]
        end = written + stop - start
        if end > buffer.shape[0]:
            raise ValueError(
                f"{end} rows do not fit a captured buffer of {buffer.shape[0]}"
            )
        rows = source if stop - start == source.shape[0] else source[start:stop]
        buffer[written:end].copy_(rows, non_blocking=True)
        written = end
    if buffer.is_floating_point():
        buffer[written : written + _TILE_ROWS].zero_()
    return written


def select_rows(
    source: torch.Tensor, offsets: Sequence[int], indices: Sequence[int]
) -> torch.Tensor:
    """The row ranges of the chosen items as one tensor; `source` itself where
    that is all of it in order."""
    if list(indices) == list(range(len(offsets) - 1)):
        return source
    if not len(indices):
        return source[:0]
    return torch.cat([source[offsets[i] : offsets[i + 1]] for i in indices])
