# SPDX-License-Identifier: Apache-2.0
"""Interpolated positions of packed rows, against loops and against vLLM's tower."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.encoders import Encoders
from vllm_encoder_cg.models.grid_rows import GridRows, bilinear_positions, locate_rows

MERGE, SIDE, HIDDEN = 2, 6, 5

shapes = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 5)).map(
        lambda size: (size[0] * MERGE, size[1] * MERGE)
    ),
    min_size=1,
    max_size=4,
)


def located(sizes: list[tuple[int, int]], unused: int = 0, pad: int = 0) -> GridRows:
    """Rows of frames of (height, width) patches."""
    lengths = [h * w for h, w in sizes]
    starts = np.concatenate([[0], np.cumsum(lengths + [0] * unused)])
    heights = [h for h, _ in sizes] + [MERGE] * unused
    widths = [w for _, w in sizes] + [MERGE] * unused
    return locate_rows(
        *(torch.tensor(v, dtype=torch.int32) for v in (starts, heights, widths)),
        torch.arange(sum(lengths) + pad, dtype=torch.int32),
        MERGE,
    )


def patches(height: int, width: int) -> list[tuple[int, int]]:
    """(row, column) of a frame's patches, block by block."""
    return [
        (top + dy, left + dx)
        for top in range(0, height, MERGE)
        for left in range(0, width, MERGE)
        for dy in range(MERGE)
        for dx in range(MERGE)
    ]


def interpolated(table: np.ndarray, y: float, x: float) -> np.ndarray:
    """The square table at a fractional place inside it."""
    y0, x0 = int(y), int(x)
    y1, x1 = min(y0 + 1, SIDE - 1), min(x0 + 1, SIDE - 1)
    upper = table[y0, x0] * (1 - (x - x0)) + table[y0, x1] * (x - x0)
    lower = table[y1, x0] * (1 - (x - x0)) + table[y1, x1] * (x - x0)
    return upper * (1 - (y - y0)) + lower * (y - y0)


@given(sizes=shapes, unused=st.integers(0, 3), pad=st.integers(0, 9))
@settings(deadline=None)
def test_bilinear_positions(
    sizes: list[tuple[int, int]], unused: int, pad: int
) -> None:
    table = np.random.default_rng(0).normal(size=(SIDE, SIDE, HIDDEN))
    weights = torch.tensor(table, dtype=torch.float32).view(-1, HIDDEN)
    expected = [
        interpolated(
            table,
            row * (SIDE - 1) / max(height - 1, 1),
            col * (SIDE - 1) / max(width - 1, 1),
        )
        for height, width in sizes
        for row, col in patches(height, width)
    ]
    result = bilinear_positions(weights, SIDE, located(sizes, unused, pad))
    assert result.shape == (len(expected) + pad, HIDDEN)
    np.testing.assert_allclose(result[: len(expected)].numpy(), expected, atol=1e-5)
    assert result.isfinite().all()


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 16, 16), (1, 2, 30), (3, 14, 6)])
def test_positions_are_the_tower_s_own(
    encoders: Encoders, grid: tuple[int, int, int]
) -> None:
    tower = encoders.get("Qwen3VLForConditionalGeneration").manager.model.visual
    frames, height, width = grid
    rows = located([(height, width)] * frames)
    with torch.inference_mode():
        positions = bilinear_positions(
            tower.pos_embed.weight, tower.num_grid_per_side, rows
        )
        expected = tower.fast_pos_embed_interpolate([list(grid)])
    torch.testing.assert_close(positions, expected, rtol=1e-5, atol=1e-6)


def test_weights_are_rounded_to_the_table_s_type() -> None:
    table = torch.randn(SIDE * SIDE, HIDDEN, dtype=torch.bfloat16)
    assert bilinear_positions(table, SIDE, located([(4, 6)])).dtype == torch.bfloat16
