# SPDX-License-Identifier: Apache-2.0
"""Getting small host tables and selected rows into captured buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class HostTable:
    """An int32 table written on the host, then copied to the device at once.

    Every instance has memory of its own: on a GPU it is pinned, and PyTorch's
    host allocator hands it out again only once the copy that reads it is over,
    so the next call may write the next table while this copy is under way.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self._host = torch.empty(
            length, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self.array: np.ndarray = self._host.numpy()
        """``[length] int32``, to be written."""

    def copy_to(self, buffer: torch.Tensor) -> None:
        """Launches the copy into ``buffer[:length]``."""
        buffer[: self._host.shape[0]].copy_(self._host, non_blocking=True)


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
        buffer[written:end].copy_(source[start:stop], non_blocking=True)
        written = end
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
