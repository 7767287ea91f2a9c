# SPDX-License-Identifier: Apache-2.0
"""Interpolated position embeddings of all rows of a packed batch in one launch.

Does what ``models.grid_rows.bilinear_positions`` does, and rounds as vLLM's
kernel for a single image does: coordinates and weights in float32, the weights
then rounded to the table's dtype, products and sums in that dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_encoder_cg.kernels.grid_search import (
    GRID_ARGUMENTS,
    find_place,
    search_steps,
)


@triton.jit(do_not_specialize=GRID_ARGUMENTS)
def _bilinear_kernel(
    table,
    row_starts,
    heights,
    widths,
    out,
    sequences,
    steps,
    SIDE: tl.constexpr,
    MERGE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    dtype = out.dtype.element_ty
    target = out + row.to(tl.int64) * HIDDEN + columns
    if row >= tl.load(row_starts + sequences):
        # Attention kernels read whole tiles of values and multiply what is beyond
        # a sequence by zero: padding must be finite.
        tl.store(target, tl.zeros([BLOCK], dtype), mask=mask)
        return
    y, x, height, width = find_place(
        row_starts, heights, widths, sequences, row, steps, MERGE
    )

    # Divided in float64, as Python would: the scale is a host number elsewhere.
    last = tl.full([], SIDE - 1, tl.float64)
    y_scale = (last / tl.maximum(height - 1, 1).to(tl.float64)).to(tl.float32)
    x_scale = (last / tl.maximum(width - 1, 1).to(tl.float64)).to(tl.float32)
    y_place = y.to(tl.float32) * y_scale
    x_place = x.to(tl.float32) * x_scale
    top = tl.math.floor(y_place).to(tl.int32)
    left = tl.math.floor(x_place).to(tl.int32)
    bottom = tl.minimum(top + 1, SIDE - 1)
    right = tl.minimum(left + 1, SIDE - 1)
    dy = y_place - top.to(tl.float32)
    dx = x_place - left.to(tl.float32)
    both = dy * dx
    lower_left = dy - both
    upper_right = dx - both
    upper_left = 1.0 - dy - upper_right

    a = tl.load(table + (top * SIDE + left) * HIDDEN + columns, mask=mask)
    b = tl.load(table + (top * SIDE + right) * HIDDEN + columns, mask=mask)
    c = tl.load(table + (bottom * SIDE + left) * HIDDEN + columns, mask=mask)
    d = tl.load(table + (bottom * SIDE + right) * HIDDEN + columns, mask=mask)
    value = (
        upper_left.to(dtype) * a
        + upper_right.to(dtype) * b
        + lower_left.to(dtype) * c
        + both.to(dtype) * d
    )
    tl.store(target, value, mask=mask)


def bilinear_positions(
    table: torch.Tensor,
    side: int,
    row_starts: torch.Tensor,
    heights: torch.Tensor,
    widths: torch.Tensor,
    rows: int,
    merge_size: int,
) -> torch.Tensor:
    """Position embeddings of packed rows.

    Args:
        table: ``[side x side, hidden]``, contiguous.
        row_starts: ``[sequences + 1] int32``, monotonic, from 0.
        heights: ``[sequences] int32``, in patches.
        widths: likewise.
        rows: rows of the result.
        merge_size: patches per side of the blocks in which rows are ordered.

    Returns:
        ``[rows, hidden]`` in the table's dtype; 0 behind the last sequence.
    """
    hidden = table.shape[1]
    sequences = heights.shape[0]
    out = torch.empty((rows, hidden), dtype=table.dtype, device=table.device)
    _bilinear_kernel[(rows,)](
        table,
        row_starts,
        heights,
        widths,
        out,
        sequences,
        search_steps(sequences),
        SIDE=side,
        MERGE=merge_size,
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
    )
    return out
