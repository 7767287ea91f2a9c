# SPDX-License-Identifier: Apache-2.0
"""The place of every row of a packed batch in one launch.

Does what ``models.grid_rows.locate_rows`` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_encoder_cg.kernels.grid_search import (
    GRID_ARGUMENTS,
    find_sequence,
    place_in_grid,
    search_steps,
)

_BLOCK = 128


@triton.jit(do_not_specialize=[*GRID_ARGUMENTS, "rows"])
def _locate_kernel(
    row_starts,
    heights,
    widths,
    out,
    sequences,
    steps,
    rows,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    inside = row < tl.load(row_starts + sequences)
    found = find_sequence(row_starts, sequences, row, steps)
    start = tl.where(inside, tl.load(row_starts + found), row)
    height = tl.load(heights + found)
    width = tl.load(widths + found)
    y, x = place_in_grid(row - start, width, MERGE)
    tl.store(out + row, y.to(tl.int64), mask=mask)
    tl.store(out + rows + row, x.to(tl.int64), mask=mask)
    tl.store(out + 2 * rows + row, height.to(tl.int64), mask=mask)
    tl.store(out + 3 * rows + row, width.to(tl.int64), mask=mask)
    tl.store(out + 4 * rows + row, start.to(tl.int64), mask=mask)


def locate_rows(
    row_starts: torch.Tensor,
    heights: torch.Tensor,
    widths: torch.Tensor,
    rows: int,
    merge_size: int,
) -> tuple[torch.Tensor, ...]:
    """Vertical and horizontal position, height and width of the frame, and its first
    row, of every row.

    Args:
        row_starts: ``[sequences + 1] int32``, monotonic, from 0.
        heights: ``[sequences] int32``, in patches.
        widths: likewise.
        rows: rows of the results.
        merge_size: patches per side of the blocks in which rows are ordered.

    Returns:
        five tensors ``[rows] int64``.
    """
    sequences = heights.shape[0]
    out = torch.empty((5, rows), dtype=torch.int64, device=row_starts.device)
    _locate_kernel[(triton.cdiv(rows, _BLOCK),)](
        row_starts,
        heights,
        widths,
        out,
        sequences,
        search_steps(sequences),
        rows,
        MERGE=merge_size,
        BLOCK=_BLOCK,
    )
    return out.unbind()
