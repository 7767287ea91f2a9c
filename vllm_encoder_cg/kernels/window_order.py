# SPDX-License-Identifier: Apache-2.0
"""The order of merged units in windows, and the way back, in one launch.

Does what ``models.windows.window_places`` and ``invert_permutation`` do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_encoder_cg.kernels.grid_search import (
    GRID_ARGUMENTS,
    find_sequence,
    search_steps,
)

_BLOCK = 128


@triton.jit(do_not_specialize=[*GRID_ARGUMENTS, "units"])
def _window_kernel(
    row_starts,
    heights,
    widths,
    places,
    order,
    sequences,
    steps,
    units,
    MERGE: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    UNIT: tl.constexpr = MERGE * MERGE
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = unit < units
    first_row = unit * UNIT
    inside = first_row < tl.load(row_starts + sequences)
    found = find_sequence(row_starts, sequences, first_row, steps)
    start = tl.load(row_starts + found) // UNIT
    local = tl.where(inside, unit - start, 0)
    height = tl.load(heights + found) // MERGE
    width = tl.load(widths + found) // MERGE
    y = local // width
    x = local % width
    top = y // SIDE * SIDE
    left = x // SIDE * SIDE
    window_height = tl.minimum(height - top, SIDE)
    window_width = tl.minimum(width - left, SIDE)
    # The units of the windows above, those of the windows to the left, and those
    # before it in its own.
    place = start + top * width + left * window_height
    place += (y - top) * window_width + (x - left)
    # Padded units keep their place.
    place = tl.where(inside, place, unit).to(tl.int64)
    tl.store(places + unit, place, mask=mask)
    tl.store(order + place, unit.to(tl.int64), mask=mask)


def window_order(
    row_starts: torch.Tensor,
    heights: torch.Tensor,
    widths: torch.Tensor,
    units: int,
    merge_size: int,
    side: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each merged unit goes in window order, and which unit comes there.

    Args:
        row_starts: ``[sequences + 1] int32``, monotonic, from 0, in patches.
        heights: ``[sequences] int32``, in patches.
        widths: likewise.
        units: of ``merge_size x merge_size`` patches.
        merge_size: patches per side of a unit.
        side: units per side of a window.

    Returns:
        two permutations ``[units] int64``, each the inverse of the other.
    """
    sequences = heights.shape[0]
    places, order = (
        torch.empty(units, dtype=torch.int64, device=row_starts.device)
        for _ in range(2)
    )
    _window_kernel[(triton.cdiv(units, _BLOCK),)](
        row_starts,
        heights,
        widths,
        places,
        order,
        sequences,
        search_steps(sequences),
        units,
        MERGE=merge_size,
        SIDE=side,
        BLOCK=_BLOCK,
    )
    return places, order
