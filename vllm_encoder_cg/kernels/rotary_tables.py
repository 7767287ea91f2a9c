# SPDX-License-Identifier: Apache-2.0
"""Rotary tables of all rows of a packed batch in one launch.

Does what ``models.grid_rows.rotary_2d`` does.
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


@triton.jit(do_not_specialize=[*GRID_ARGUMENTS, "rows"])
def _rotary_kernel(
    cache,
    row_starts,
    heights,
    widths,
    cos_out,
    sin_out,
    sequences,
    steps,
    rows,
    MERGE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < tl.load(row_starts + sequences)
    found = find_sequence(row_starts, sequences, row, steps)
    local = tl.where(inside, row - tl.load(row_starts + found), 0)
    y, x = place_in_grid(local, tl.load(widths + found), MERGE)

    column = tl.arange(0, BLOCK_COLUMNS)
    vertical = column < HALF
    place = tl.where(vertical[None, :], y[:, None], x[:, None])
    source = place * (2 * HALF) + tl.where(vertical, column, column - HALF)[None, :]
    mask = (row < rows)[:, None] & (column < 2 * HALF)[None, :]
    target = row[:, None] * (2 * HALF) + column[None, :]
    tl.store(cos_out + target, tl.load(cache + source, mask=mask), mask=mask)
    tl.store(sin_out + target, tl.load(cache + source + HALF, mask=mask), mask=mask)


def rotary_tables(
    cos_sin_cache: torch.Tensor,
    row_starts: torch.Tensor,
    heights: torch.Tensor,
    widths: torch.Tensor,
    rows: int,
    merge_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of packed rows, the vertical part first.

    Args:
        cos_sin_cache: ``[positions, 2 d]``, contiguous: cos, then sin.
        row_starts: ``[sequences + 1] int32``, monotonic, from 0.
        heights: ``[sequences] int32``, in patches.
        widths: likewise.
        rows: rows of the results.
        merge_size: patches per side of the blocks in which rows are ordered.

    Returns:
        two tensors ``[rows, 2 d]``; rows behind the last sequence hold those of
        the first position.
    """
    half = cos_sin_cache.shape[1] // 2
    sequences = heights.shape[0]
    cos, sin = (
        torch.empty(
            (rows, 2 * half), dtype=cos_sin_cache.dtype, device=cos_sin_cache.device
        )
        for _ in range(2)
    )
    block_rows = 16
    _rotary_kernel[(triton.cdiv(rows, block_rows),)](
        cos_sin_cache,
        row_starts,
        heights,
        widths,
        cos,
        sin,
        sequences,
        search_steps(sequences),
        rows,
        MERGE=merge_size,
        HALF=half,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=triton.next_power_of_2(2 * half),
    )
    return cos, sin
