# SPDX-License-Identifier: Apache-2.0
"""Getting small host tables and selected rows into captured buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

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
            # Without a stream, PyTorch looks up the device first, which takes longer.
            self._copied.record(torch.cuda.current_stream(buffer.get_device()))

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


class DeviceTables:
    """Tables that are already on the device, the latest few of every layout.

    Batches of sizes that were seen before are usual where images come one by one;
    what their table says need not be written and sent again.
    """

    def __init__(self, per_layout: int = 16) -> None:
        self._per_layout = per_layout
        self._known: dict[Hashable, dict[Hashable, torch.Tensor]] = {}

    def fill(
        self,
        buffer: torch.Tensor,
        layout: Hashable,
        content: Hashable,
        write: Callable[[], HostTable],
    ) -> None:
        """Launches the copy of a table into a captured buffer.

        Args:
            buffer: ``[length] int32``.
            layout: of the table; all tables of a layout have one length.
            content: what the table is written from.
            write: called for a table that is not known.
        """
        known = self._known.setdefault(layout, {})
        table = known.pop(content, None)
        if table is None:
            source = write()
            with torch.inference_mode():
                if len(known) < self._per_layout:
                    table = torch.empty_like(buffer)
                else:  # the one that was not used for longest
                    table = known.pop(next(iter(known)))
                source.copy_to(table)
        known[content] = table
        buffer.copy_(table)


def copy_rows(
    source: torch.Tensor,
    offsets: Sequence[int],
    indices: Sequence[int],
    buffer: torch.Tensor,
    cleared: int = _TILE_ROWS,
) -> int:
    """Copies the row ranges of the chosen items next to each other, in one launch
    where all is on one device.

    Args:
        source: ``[rows, ...]``.
        offsets: item i has the rows ``offsets[i] : offsets[i + 1]``.
        buffer: ``[capacity rows, ...]``, written from row 0.
        cleared: rows to clear behind those that are written; 0 where rows do not
            look at each other.

    Attention kernels read whole tiles of values, also beyond the last sequence,
    and multiply what does not belong to it by zero; so rows that may have been left
    not finite are cleared as far as a tile reaches.

    Returns:
        The rows written.

    Raises:
        ValueError: they are more, or of another shape, than the buffer holds, or
            than there are.
    """
    ranges = _row_ranges(offsets, indices)
    written = sum([stop - start for start, stop in ranges])
    capacity = buffer.shape[0]
    if written > capacity:
        raise ValueError(f"{written} rows do not fit a captured buffer of {capacity}")
    last = max(ranges, default=(0, 0))[1]
    if last > source.shape[0] or source.shape[1:] != buffer.shape[1:]:
        raise ValueError(
            f"rows up to {last} of {tuple(source.shape)} cannot be copied into "
            f"{tuple(buffer.shape)}"
        )
    if len(ranges) == 1:
        start, stop = ranges[0]
        rows = source if written == source.shape[0] else source[start:stop]
        target = buffer if written == capacity else buffer[:written]
        target.copy_(rows, non_blocking=True)
    elif source.device == buffer.device:
        parts = [source[start:stop] for start, stop in ranges]
        if source.dtype != buffer.dtype:
            buffer[:written].copy_(torch.cat(parts))
        elif parts:
            torch.cat(parts, out=buffer[:written])
    else:
        end = 0
        for start, stop in ranges:
            begin, end = end, end + stop - start
            buffer[begin:end].copy_(source[start:stop], non_blocking=True)
    if cleared and written < capacity and buffer.is_floating_point():
        buffer[written : written + cleared].zero_()
    return written


def _row_ranges(
    offsets: Sequence[int], indices: Sequence[int]
) -> list[tuple[int, int]]:
    """First row and end of each run of neighbours among `indices`."""
    if not len(indices):
        return []
    first, last = indices[0], indices[-1]
    if list(indices) == list(range(first, last + 1)):
        return [(offsets[first], offsets[last + 1])]
    ranges = []
    since = before = first
    for index in indices[1:]:
        if index != before + 1:
            ranges.append((offsets[since], offsets[before + 1]))
            since = index
        before = index
    ranges.append((offsets[since], offsets[before + 1]))
    return ranges


def select_rows(
    source: torch.Tensor, offsets: Sequence[int], indices: Sequence[int]
) -> torch.Tensor:
    """The row ranges of the chosen items as one tensor; `source` itself where
    that is all of it in order."""
    ranges = _row_ranges(offsets, indices)
    if not ranges:
        return source[:0]
    parts = [source[start:stop] for start, stop in ranges]
    if len(parts) > 1:
        return torch.cat(parts)
    return source if len(parts[0]) == len(source) else parts[0]
