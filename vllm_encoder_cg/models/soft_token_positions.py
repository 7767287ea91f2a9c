# SPDX-License-Identifier: Apache-2.0
"""Keeps Gemma 4's patch positions, which only the device knows, inside its tables.

An index beyond a table is an illegal access on a GPU, after which nothing works any
more in the process.
"""

from __future__ import annotations

import torch

PADDING = -1
"""Both coordinates of a patch that is padding."""


def keep_inside(
    positions: torch.Tensor, kernel: int, length: int, table_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns rows whose positions do not fit into padding.

    Args:
        positions: ``[rows, patches, 2] int64``: (x, y) of each patch.
        kernel: patches per side of a soft token.
        length: soft tokens of a row.
        table_size: positions that the tower has embeddings for, per coordinate.

    Returns:
        The positions, and ``[rows] float32``: NaN for rows that did not fit, else 0.
    """
    places = positions.clamp(min=0)
    x, y = places.unbind(-1)
    columns = (x.amax(-1, keepdim=True) + 1) // kernel
    pooled = x // kernel + columns * (y // kernel)
    outside = ((pooled >= length) | (places >= table_size).any(-1)).any(-1)
    kept = torch.where(outside[:, None, None], PADDING, positions)
    return kept, torch.where(outside, float("nan"), 0.0)
