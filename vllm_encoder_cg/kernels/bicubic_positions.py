# SPDX-License-Identifier: Apache-2.0
"""Bicubically interpolated position embeddings of all rows in one launch.

Does what ``models.grid_rows.bicubic_positions`` does, in the order of PyTorch's
own kernels (along the width first, float32 throughout, one rounding at the
end), so that a captured forward rounds as the eager one.
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


@triton.jit
def _source_place(position, size, SIDE: tl.constexpr, NORMALISED: tl.constexpr):
    """Where row or column `position` of `size` falls on the table.

    Divisions are rounded to nearest, as PyTorch's are; Triton's own ``/`` is not.
    """
    centre = position.to(tl.float32) + 0.5
    if NORMALISED:
        # By way of [-1, 1], as grid_sample takes coordinates.
        unit = tl.math.div_rn(centre, size.to(tl.float32)) * 2.0 - 1.0
        return ((unit + 1.0) * SIDE - 1.0) / 2.0
    scale = tl.math.div_rn(tl.full([], SIDE, tl.float32), size.to(tl.float32))
    return scale * centre - 0.5


@triton.jit
def _near(x):
    return (1.25 * x - 2.25) * x * x + 1.0


# Its argument is written as PyTorch computes it: 1 - u + 1 is rounded twice.
@triton.jit
def _far(x):
    return ((-0.75 * x + 3.75) * x - 6.0) * x + 3.0


@triton.jit(do_not_specialize=GRID_ARGUMENTS)
def _bicubic_kernel(
    table,
    row_starts,
    heights,
    widths,
    out,
    sequences,
    steps,
    TABLE_HEIGHT: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    NORMALISED: tl.constexpr,
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

    y_place = _source_place(y, height, TABLE_HEIGHT, NORMALISED)
    x_place = _source_place(x, width, TABLE_WIDTH, NORMALISED)
    top = tl.math.floor(y_place)
    left = tl.math.floor(x_place)
    v = y_place - top
    u = x_place - left
    y0 = top.to(tl.int32) - 1
    x0 = left.to(tl.int32) - 1
    a = tl.minimum(tl.maximum(x0, 0), TABLE_WIDTH - 1)
    b = tl.minimum(tl.maximum(x0 + 1, 0), TABLE_WIDTH - 1)
    c = tl.minimum(tl.maximum(x0 + 2, 0), TABLE_WIDTH - 1)
    d = tl.minimum(tl.maximum(x0 + 3, 0), TABLE_WIDTH - 1)

    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(4):
        line = tl.minimum(tl.maximum(y0 + i, 0), TABLE_HEIGHT - 1) * TABLE_WIDTH
        e = tl.load(table + (line + a) * HIDDEN + columns, mask=mask).to(tl.float32)
        f = tl.load(table + (line + b) * HIDDEN + columns, mask=mask).to(tl.float32)
        g = tl.load(table + (line + c) * HIDDEN + columns, mask=mask).to(tl.float32)
        h = tl.load(table + (line + d) * HIDDEN + columns, mask=mask).to(tl.float32)
        along = e * _far(u + 1.0) + f * _near(u)
        along = along + g * _near(1.0 - u) + h * _far(1.0 - u + 1.0)
        if i == 0:
            total = along * _far(v + 1.0)
        elif i == 1:
            total = total + along * _near(v)
        elif i == 2:
            total = total + along * _near(1.0 - v)
        else:
            total = total + along * _far(1.0 - v + 1.0)
    tl.store(target, total.to(dtype), mask=mask)


def bicubic_positions(
    table: torch.Tensor,
    table_height: int,
    table_width: int,
    row_starts: torch.Tensor,
    heights: torch.Tensor,
    widths: torch.Tensor,
    rows: int,
    merge_size: int,
    normalised: bool,
) -> torch.Tensor:
    """Position embeddings of packed rows, corners not aligned.

    Args:
        table: ``[table_height x table_width, hidden]``, contiguous.
        row_starts: ``[sequences + 1] int32``, monotonic, from 0.
        heights: ``[sequences] int32``, in patches.
        widths: likewise.
        rows: rows of the result.
        merge_size: patches per side of the blocks in which rows are ordered.
        normalised: whether the eager forward goes by way of coordinates in
            [-1, 1] (``grid_sample``); only rounding differs.

    Returns:
        ``[rows, hidden]`` in the table's dtype; 0 behind the last sequence.
    """
    hidden = table.shape[1]
    sequences = heights.shape[0]
    out = torch.empty((rows, hidden), dtype=table.dtype, device=table.device)
    _bicubic_kernel[(rows,)](
        table,
        row_starts,
        heights,
        widths,
        out,
        sequences,
        search_steps(sequences),
        TABLE_HEIGHT=table_height,
        TABLE_WIDTH=table_width,
        NORMALISED=normalised,
        MERGE=merge_size,
        HIDDEN=hidden,
        BLOCK=triton.next_power_of_2(hidden),
    )
    return out
