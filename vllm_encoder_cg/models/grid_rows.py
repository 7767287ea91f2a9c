# SPDX-License-Identifier: Apache-2.0
"""Where each packed row stands in its image: computed on the device.

Packed towers need, per row (patch), its place in its frame's grid: rotary
angles and learned positions follow from it.  Building those tables on the host
costs time per call; here they follow from a few integers per sequence (its
first row, its height and width in patches), by tensor operations of fixed
shape that are captured with the forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class GridRows:
    """Per row of a packed batch; a padded row is the first of a grid of its own."""

    row: torch.Tensor
    """``[rows] int64``: vertical position in the frame, in patches."""
    col: torch.Tensor
    """``[rows] int64``: horizontal position."""
    height: torch.Tensor
    """``[rows] int64``: height of the row's frame, in patches."""
    width: torch.Tensor
    """``[rows] int64``."""
    start: torch.Tensor
    """``[rows] int64``: index of the first row of the row's frame."""

    def places(self) -> torch.Tensor:
        """``[rows, 2] int64``: (vertical, horizontal)."""
        return torch.stack((self.row, self.col), dim=1)


def locate_rows(
    row_starts: torch.Tensor,
    heights: torch.Tensor,
    widths: torch.Tensor,
    row_index: torch.Tensor,
    merge_size: int,
) -> GridRows:
    """Places every row in its grid.

    Rows come in merge order: the patches of one ``merge_size x merge_size``
    block are neighbours, blocks run along the width first.  ``merge_size`` 1 is
    row-major order.

    Args:
        row_starts: ``[sequences + 1] int32``, monotonic, from 0.
        heights: ``[sequences] int32`` in patches, multiples of `merge_size`;
            `merge_size` for unused sequences.
        widths: likewise.
        row_index: ``[rows] int32``: 0, 1, 2, ...
        merge_size: patches per side of a merged block.
    """
    last = heights.shape[0] - 1
    sequence = torch.searchsorted(row_starts[1:], row_index, right=True)
    inside = sequence <= last
    sequence = sequence.clamp(max=last)
    start = row_starts[:-1].index_select(0, sequence)
    start = torch.where(inside, start, row_index).long()
    local = row_index - start
    height = heights.index_select(0, sequence).long()
    width = widths.index_select(0, sequence).long()
    if merge_size == 1:
        row = local.div(width, rounding_mode="floor")
        return GridRows(row, local - row * width, height, width, start)
    unit = merge_size * merge_size
    block = local.div(unit, rounding_mode="floor")
    within = local - block * unit
    blocks_per_row = width.div(merge_size, rounding_mode="floor")
    block_row = block.div(blocks_per_row, rounding_mode="floor")
    block_col = block - block_row * blocks_per_row
    within_row = within.div(merge_size, rounding_mode="floor")
    return GridRows(
        block_row * merge_size + within_row,
        block_col * merge_size + within - within_row * merge_size,
        height,
        width,
        start,
    )


def rotary_2d(
    cos_cache: torch.Tensor, sin_cache: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of two-dimensional rotary positions.

    Args:
        cos_cache: ``[positions, d]``: of one coordinate.
        sin_cache: likewise.
        places: ``[rows, 2] int64``: (vertical, horizontal).

    Returns:
        two tensors ``[rows, 2 d]``: the vertical part, then the horizontal.
    """
    return cos_cache[places].flatten(1), sin_cache[places].flatten(1)


def bilinear_positions(table: torch.Tensor, side: int, rows: GridRows) -> torch.Tensor:
    """Position embeddings interpolated from a square table, corners aligned.

    Coordinate ``i`` of ``n`` maps to ``i (side - 1) / (n - 1)`` (0 for
    ``n = 1``), the rule of Qwen3-VL's tower.  Weights are computed in float32
    and rounded to the table's dtype before the sum, as the eager forward does.

    Args:
        table: ``[side x side, hidden]``.
        side: positions per side of the table.

    Returns:
        ``[rows, hidden]`` in the table's dtype.
    """

    def coordinate(
        position: torch.Tensor, size: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = (side - 1) / (size - 1).clamp(min=1).double()
        scaled = position.float() * scale.float()
        low = scaled.long()
        return low, (low + 1).clamp(max=side - 1), scaled - low

    top, bottom, dh = coordinate(rows.row, rows.height)
    left, right, dw = coordinate(rows.col, rows.width)
    both = dh * dw
    corners = (
        (top, left, 1 - dh - (dw - both)),
        (top, right, dw - both),
        (bottom, left, dh - both),
        (bottom, right, both),
    )
    out: torch.Tensor | None = None
    for y, x, weight in corners:
        part = table[y * side + x] * weight.to(table.dtype).unsqueeze(1)
        out = part if out is None else out + part
    assert out is not None
    return out


def _cubic_weights(fraction: torch.Tensor) -> torch.Tensor:
    """``[..., 4]``: cubic convolution weights, a = -0.75, of the samples at -1, 0,
    1 and 2 for a place `fraction` behind 0."""
    a = -0.75

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: torch.Tensor) -> torch.Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    rest = 1 - fraction
    weights = far(fraction + 1), near(fraction), near(rest), far(rest + 1)
    return torch.stack(weights, dim=-1)


def bicubic_positions(
    table: torch.Tensor, table_height: int, table_width: int, rows: GridRows
) -> torch.Tensor:
    """Position embeddings interpolated bicubically, corners not aligned.

    Coordinate ``i`` of ``n`` maps to ``(i + 0.5) side / n - 0.5``; beyond the
    border the outermost samples repeat.  The weighted sum over the 16 samples is
    one kernel, where ``grid_sample`` runs through the channels one by one.

    Args:
        table: ``[table_height x table_width, hidden]``.

    Returns:
        ``[rows, hidden]`` in float32.
    """

    def coordinate(
        position: torch.Tensor, size: torch.Tensor, side: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        place = (position.float() + 0.5) * (side / size.float()) - 0.5
        low = place.floor()
        taps = torch.stack([low + offset for offset in (-1, 0, 1, 2)], dim=-1)
        return taps.long().clamp(0, side - 1), _cubic_weights(place - low)

    y, y_weights = coordinate(rows.row, rows.height, table_height)
    x, x_weights = coordinate(rows.col, rows.width, table_width)
    samples = y.unsqueeze(2) * table_width + x.unsqueeze(1)
    weights = y_weights.unsqueeze(2) * x_weights.unsqueeze(1)
    return F.embedding_bag(
        samples.flatten(1),
        table.float(),
        per_sample_weights=weights.flatten(1),
        mode="sum",
    )
