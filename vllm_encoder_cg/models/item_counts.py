# SPDX-License-Identifier: Apache-2.0
"""How many rows, slices or tiles each item of a batch has: read, and made up for
samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def read_counts(value: Any) -> list[int] | None:
    """Counts as Python integers; None: not there.

    Args:
        value: a tensor, which vLLM keeps on the host, or a sequence of numbers.
    """
    if isinstance(value, torch.Tensor):
        return value.flatten().tolist()
    return None if value is None else [int(count) for count in value]


def row_numbers(offsets: Sequence[int], indices: Sequence[int]) -> list[int]:
    """Numbers of the rows of the items at `indices`, in that order.

    Args:
        offsets: ``[items + 1]``: item i has the rows ``offsets[i] : offsets[i + 1]``.
    """
    return [row for i in indices for row in range(offsets[i], offsets[i + 1])]


def unlike_counts(total: int, most: int) -> list[int]:
    """`total` as a sum of up to 4, and up to `most`, positive unlike parts."""
    counts: list[int] = []
    left = total
    while left and len(counts) < min(4, most) - 1:
        counts.append(-(-left * 2 // 5))
        left -= counts[-1]
    return [*counts, left] if left else counts
