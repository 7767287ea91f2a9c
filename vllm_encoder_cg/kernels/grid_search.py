# SPDX-License-Identifier: Apache-2.0
"""Where a packed row stands in its frame, for use inside other kernels.

The device functions do what ``models.grid_rows.locate_rows`` does.
"""

from __future__ import annotations

import triton
import triton.language as tl

GRID_ARGUMENTS = ("row_starts", "heights", "widths", "sequences", "steps")
"""Of every kernel that searches.  Graphs differ in them, and Triton would compile a
kernel anew for a count of 1, for multiples of 16 and for addresses of 16 bytes."""


@triton.jit
def find_sequence(row_starts, sequences, row, steps):
    """Index of the sequence that holds `row`, by bisection.

    Args:
        row_starts: pointer to ``[sequences + 1] int32``, monotonic from 0.
        row: int32 scalar or block, below ``row_starts[sequences]``.
        steps: bisections; at least the binary logarithm of `sequences`.
    """
    low = row * 0
    high = low + sequences
    for _ in range(steps):
        middle = (low + high) // 2
        holds = tl.load(row_starts + middle) <= row
        low = tl.where(holds, middle, low)
        high = tl.where(holds, high, middle)
    return low


@triton.jit
def place_in_grid(local, width, MERGE: tl.constexpr):
    """Vertical and horizontal position of row `local` of a frame whose rows come
    in blocks of ``MERGE x MERGE``."""
    block = local // (MERGE * MERGE)
    within = local % (MERGE * MERGE)
    blocks_per_row = width // MERGE
    y = block // blocks_per_row * MERGE + within // MERGE
    x = block % blocks_per_row * MERGE + within % MERGE
    return y, x


@triton.jit
def find_place(row_starts, heights, widths, sequences, row, steps, MERGE: tl.constexpr):
    """Vertical and horizontal position of `row` in its frame, and the frame's height
    and width.

    Args:
        row: int32 scalar, below ``row_starts[sequences]``.
    """
    sequence = find_sequence(row_starts, sequences, row, steps)
    local = row - tl.load(row_starts + sequence)
    height = tl.load(heights + sequence)
    width = tl.load(widths + sequence)
    y, x = place_in_grid(local, width, MERGE)
    return y, x, height, width


def search_steps(sequences: int) -> int:
    """``steps`` for that many sequences."""
    return max(1, (sequences - 1).bit_length())
