# SPDX-License-Identifier: Apache-2.0
"""Random mixes of images and videos, and where their patches are, by plain loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from vllm_encoder_cg.models.grid_rows import GridRows, locate_rows
from vllm_encoder_cg.models.packed_layout import Grid, PackedLayout

MERGE = 2
UNIT = MERGE * MERGE

_side = st.integers(1, 14)

#: (frames, height, width) of one item, in merged units.
item = st.tuples(st.integers(1, 4), _side, _side)


def mixes(max_items: int = 6) -> st.SearchStrategy[list[Grid]]:
    """Grids, in patches, of one to so many images and videos."""
    grid = item.map(lambda units: (units[0], MERGE * units[1], MERGE * units[2]))
    return st.lists(grid, min_size=1, max_size=max_items)


def frames_of(grids: Sequence[Grid]) -> list[tuple[int, int]]:
    """Height and width of each frame."""
    return [(h, w) for t, h, w in grids for _ in range(t)]


def patches_of(height: int, width: int, merge: int) -> Iterator[tuple[int, int]]:
    """(row, column) of each patch of a frame, in the order of its rows."""
    for top in range(0, height, merge):
        for left in range(0, width, merge):
            for row in range(merge):
                for col in range(merge):
                    yield top + row, left + col


def locate(layout: PackedLayout, tables: np.ndarray, merge: int) -> GridRows:
    """The places of all rows of a table."""
    device_tables = torch.from_numpy(tables)
    return locate_rows(
        layout.row_starts(device_tables),
        layout.heights(device_tables),
        layout.widths(device_tables),
        torch.arange(layout.table.rows, dtype=torch.int32),
        merge,
    )


def written(layout: PackedLayout, grids: Sequence[Grid]) -> np.ndarray:
    """A table that held something else before."""
    tables = np.full(layout.length, 987654, dtype=np.int32)
    layout.write(grids, tables)
    return tables
