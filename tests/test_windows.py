# SPDX-License-Identifier: Apache-2.0
"""The window order of any mix of images and videos, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.grids import MERGE, UNIT, frames_of, locate, mixes, written
from vllm_encoder_cg.models.attention_tables import SequenceTable, make_sequence_table
from vllm_encoder_cg.models.packed_layout import Grid
from vllm_encoder_cg.models.qwen2_5_vl import WindowedLayout
from vllm_encoder_cg.models.windows import (
    count_windows,
    invert_permutation,
    max_windows,
    window_lengths,
    window_places,
)

SIDE = 4
PAD_ROWS = 5 * UNIT
ROW_ELEMENTS = 64


def windows_of(height: int, width: int, side: int) -> list[list[int]]:
    """Units of each window of a frame of so many units, by their index in it."""
    return [
        [
            row * width + col
            for row in range(top, min(top + side, height))
            for col in range(left, min(left + side, width))
        ]
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def expected_windows(grids: list[Grid]) -> list[list[int]]:
    """Units of each window, by their index in the whole batch."""
    windows: list[list[int]] = []
    start = 0
    for height, width in frames_of(grids):
        frame = windows_of(height // MERGE, width // MERGE, SIDE)
        windows += [[start + unit for unit in window] for window in frame]
        start += height * width // UNIT
    return windows


def make_layout(grids: list[Grid], backend: str = "FLASH_ATTN") -> WindowedLayout:
    """With room for three frames and five windows more."""
    rows = sum(t * h * w for t, h, w in grids) + PAD_ROWS

    def table(sequences: int) -> SequenceTable:
        return make_sequence_table(backend, sequences, rows, ROW_ELEMENTS)

    frames = table(len(frames_of(grids)) + 3)
    windows = table(len(expected_windows(grids)) + 5)
    return WindowedLayout(frames, MERGE, windows, SIDE)


@given(mixes())
@settings(deadline=None, max_examples=40)
def test_order_and_its_inverse(grids: list[Grid]) -> None:
    layout = make_layout(grids)
    places = window_places(locate(layout, written(layout, grids), MERGE), MERGE, SIDE)
    order = invert_permutation(places, torch.arange(len(places)))

    flat = [unit for window in expected_windows(grids) for unit in window]
    padded = range(len(flat), layout.table.rows // UNIT)
    assert order.tolist() == [*flat, *padded]
    assert places[order].tolist() == list(range(len(order)))


@given(mixes())
@settings(deadline=None, max_examples=40)
def test_offsets_are_those_of_the_windows(grids: list[Grid]) -> None:
    layout = make_layout(grids)
    tables = torch.from_numpy(written(layout, grids))
    lengths = [UNIT * len(window) for window in expected_windows(grids)]
    offsets = np.cumsum([0, *lengths]).tolist()

    result = layout.windows.arguments(layout.window_table(tables)).cu_seqlens.tolist()
    assert result == [*offsets, *[offsets[-1]] * 5]
    frames = np.cumsum([0, *(h * w for h, w in frames_of(grids))]).tolist()
    assert layout.row_starts(tables).tolist() == [*frames, *[frames[-1]] * 3]


@given(mixes())
@settings(deadline=None, max_examples=40)
def test_offsets_for_cudnn_lie_in_sections(grids: list[Grid]) -> None:
    layout = make_layout(grids, "FLASHINFER")
    tables = torch.from_numpy(written(layout, grids))
    arguments = layout.windows.arguments(layout.window_table(tables))
    lengths = [UNIT * len(window) for window in expected_windows(grids)]
    assert arguments.sequence_lengths is not None
    batch = len(arguments.sequence_lengths)
    offsets = np.cumsum([0, *lengths, *[0] * (batch - len(lengths))])

    assert arguments.sequence_lengths.tolist() == np.diff(offsets).tolist()
    qko, v = arguments.cu_seqlens.split(batch + 1)
    assert qko.tolist() == (ROW_ELEMENTS * offsets).tolist()
    assert v.tolist() == (3 * ROW_ELEMENTS * offsets).tolist()


@given(mixes())
@settings(deadline=None, max_examples=40)
def test_sdpa_covers_every_row(grids: list[Grid]) -> None:
    layout = make_layout(grids, "TORCH_SDPA")
    tables = torch.from_numpy(written(layout, grids))
    for table, section in (
        (layout.table, layout.sequence_table(tables)),
        (layout.windows, layout.window_table(tables)),
    ):
        offsets = table.arguments(section).cu_seqlens
        assert offsets[0] == 0 and offsets[-1] == layout.table.rows
        assert (offsets.diff() >= 0).all()


@pytest.mark.parametrize("side", [1, 2, 4, 7])
@given(st.integers(1, 30), st.integers(1, 30))
@settings(deadline=None, max_examples=40)
def test_lengths_and_their_number(side: int, height: int, width: int) -> None:
    lengths = [len(window) for window in windows_of(height, width, side)]
    assert window_lengths(height, width, side).tolist() == lengths
    assert count_windows(height, width, side) == len(lengths)


@pytest.mark.parametrize("side", [1, 2, 4, 7])
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1))
@settings(deadline=None, max_examples=40)
def test_no_mix_has_more_windows_than_the_bound(
    side: int, frames: list[tuple[int, int]]
) -> None:
    units = sum(height * width for height, width in frames)
    windows = sum(count_windows(height, width, side) for height, width in frames)
    assert windows <= max_windows(units, len(frames), side)


def test_kept_lengths_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        window_lengths(5, 5, 4)[0] = 1
