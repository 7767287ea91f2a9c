# SPDX-License-Identifier: Apache-2.0
"""What packed towers are given for any mix of images and videos, against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.grids import (
    MERGE,
    UNIT,
    frames_of,
    locate,
    mixes,
    patches_of,
    written,
)
from vllm_encoder_cg.definitions import GraphCapacity
from vllm_encoder_cg.models.attention_tables import SequenceTable, make_sequence_table
from vllm_encoder_cg.models.ernie4_5_vl import PairedLayout
from vllm_encoder_cg.models.grid_rows import bicubic_positions, rotary_2d
from vllm_encoder_cg.models.packed_layout import Grid, PackedLayout
from vllm_encoder_cg.models.packed_samples import sample_grids

PAD_ROWS = 3 * UNIT


def make_table(grids: list[Grid]) -> SequenceTable:
    """With room for two frames more."""
    rows = sum(t * h * w for t, h, w in grids) + PAD_ROWS
    return make_sequence_table("FLASH_ATTN", len(frames_of(grids)) + 2, rows, 64)


@pytest.mark.parametrize("merge", [1, MERGE], ids=["row by row", "merge order"])
@given(mixes())
@settings(deadline=None, max_examples=40)
def test_every_row_is_located(merge: int, grids: list[Grid]) -> None:
    layout = PackedLayout(make_table(grids), MERGE)
    rows = locate(layout, written(layout, grids), merge)
    expected: list[tuple[int, int, int, int, int]] = []
    for height, width in frames_of(grids):
        start = len(expected)
        expected += [
            (row, col, height, width, start)
            for row, col in patches_of(height, width, merge)
        ]
    count = len(expected)
    fields = (rows.row, rows.col, rows.height, rows.width, rows.start)
    assert torch.stack(fields, dim=1)[:count].tolist() == [*map(list, expected)]
    # A padded row is the first of a grid of its own, which lies inside any table.
    assert not rows.places()[count:].any()
    assert rows.start[count:].tolist() == list(range(count, count + PAD_ROWS))
    assert (rows.height[count:] > 0).all() and (rows.width[count:] > 0).all()


@given(mixes())
@settings(deadline=None, max_examples=40)
def test_order_of_merging_rows_that_lie_row_by_row(grids: list[Grid]) -> None:
    layout = PackedLayout(make_table(grids), MERGE)
    merged = locate(layout, written(layout, grids), MERGE)
    order = merged.start + merged.row * merged.width + merged.col
    expected: list[int] = []
    for height, width in frames_of(grids):
        start = len(expected)
        expected += [
            start + row * width + col for row, col in patches_of(height, width, MERGE)
        ]
    padded = range(len(expected), layout.table.rows)
    assert order.tolist() == [*expected, *padded]


@given(mixes())
@settings(deadline=None, max_examples=40)
def test_rotary_tables_hold_vertical_then_horizontal(grids: list[Grid]) -> None:
    layout = PackedLayout(make_table(grids), MERGE)
    rows = locate(layout, written(layout, grids), MERGE)
    cos, sin = torch.randn(2, 64, 3)
    rotary_cos, rotary_sin = rotary_2d(cos, sin, rows.places())
    assert torch.equal(rotary_cos, torch.cat((cos[rows.row], cos[rows.col]), dim=1))
    assert torch.equal(rotary_sin, torch.cat((sin[rows.row], sin[rows.col]), dim=1))


@pytest.mark.parametrize("table_size", [(8, 8), (24, 24), (6, 10)], ids=str)
@given(grids=mixes())
@settings(deadline=None, max_examples=30)
def test_bicubic_positions_equal_interpolation(
    table_size: tuple[int, int], grids: list[Grid]
) -> None:
    layout = PackedLayout(make_table(grids), MERGE)
    rows = locate(layout, written(layout, grids), MERGE)
    table = torch.randn(*table_size, 5, generator=torch.Generator().manual_seed(0))
    result = bicubic_positions(table.flatten(0, 1), *table_size, rows)
    start = 0
    for size in frames_of(grids):
        image = table.permute(2, 0, 1)[None]
        resized = F.interpolate(image, size=size, mode="bicubic")[0]
        expected = [resized[:, row, col] for row, col in patches_of(*size, MERGE)]
        part = result[start : start + len(expected)]
        torch.testing.assert_close(part, torch.stack(expected), rtol=1e-5, atol=2e-5)
        start += len(expected)
    assert result[start:].isfinite().all()


def test_bicubic_positions_equal_grid_sample() -> None:
    grid = (1, 10, 14)
    layout = PackedLayout(make_table([grid]), MERGE)
    rows = locate(layout, written(layout, [grid]), MERGE)
    table = torch.randn(24 * 24, 5, generator=torch.Generator().manual_seed(0))
    places = rows.places()[:140].flip(1)
    coordinates = (places + 0.5) / torch.tensor([14.0, 10.0]) * 2 - 1
    expected = F.grid_sample(
        table.view(1, 24, 24, 5).permute(0, 3, 1, 2),
        coordinates[None, :, None],
        mode="bicubic",
        align_corners=False,
        padding_mode="border",
    )
    result = bicubic_positions(table, 24, 24, rows)[:140]
    torch.testing.assert_close(result, expected[0, :, :, 0].T, rtol=1e-5, atol=2e-5)


@given(mixes())
@settings(deadline=None, max_examples=40)
def test_pairs_of_frames(grids: list[Grid]) -> None:
    # Videos of this model have an even number of frames.
    grids = [(1 if t == 1 else 2 * t, h, w) for t, h, w in grids]
    layout = PairedLayout(make_table(grids), MERGE)
    tables = torch.from_numpy(written(layout, grids))
    pairs: list[tuple[int, int]] = []
    start = 0
    for t, h, w in grids:
        units = h * w // UNIT
        for frame in range(0, t, 2):
            first = start + frame * units
            second = first if t == 1 else first + units
            pairs += [(first + i, second + i) for i in range(units)]
        start += t * units
    tokens = layout.table.rows // UNIT
    first_unit, second_unit = layout.pair_units(
        tables, torch.arange(tokens, dtype=torch.int32)
    )
    result = list(zip(first_unit.tolist(), second_unit.tolist(), strict=True))
    assert result == [*pairs, *[(0, 0)] * (tokens - len(pairs))]


@given(
    st.integers(1, 3000), st.integers(1, 64), st.integers(1, 64), st.integers(0, 100)
)
@settings(deadline=None, max_examples=40)
def test_sample_grids_fit_the_capacity(
    units: int, items: int, sequences: int, seed: int
) -> None:
    capacity = GraphCapacity(
        units, items, {"rows": units * UNIT, "sequences": sequences}
    )
    for videos in (True, False):
        grids = sample_grids(capacity, MERGE, seed, videos)
        assert 1 <= len(grids) <= items
        assert sum(t for t, _, _ in grids) <= sequences
        assert sum(t * h * w for t, h, w in grids) <= units * UNIT
        assert len({t for t, _, _ in grids}) == 1
        assert all(h % MERGE == 0 and w % MERGE == 0 for _, h, w in grids)
        assert videos or grids[0][0] == 1


def test_table_of_a_smaller_batch_keeps_nothing_of_the_larger() -> None:
    large, small = [(1, 8, 8), (3, 4, 6), (1, 12, 2)], [(1, 4, 4)]
    layout = PackedLayout(make_table(large), MERGE)
    tables = written(layout, large)
    layout.write(small, tables)
    assert np.array_equal(tables, written(layout, small))
