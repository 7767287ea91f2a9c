# SPDX-License-Identifier: Apache-2.0
"""Attention inside windows: the order of rows, and the lengths of the windows.

A frame of merged units is cut into squares of `side` units, narrower at the
right and the bottom edge; window by window, the units of one window become
neighbours.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from vllm_encoder_cg.models.grid_rows import GridRows


def window_places(rows: GridRows, merge_size: int, side: int) -> torch.Tensor:
    """Where each merged unit goes in window order.

    Computed from the places of its first patch: the units of the windows above,
    then those of the windows to the left, then those before it in its own.
    Padded units keep their place, so this is a permutation.

    Args:
        rows: of the patches, in merge order.
        side: units per side of a window.

    Returns:
        ``[rows / merge_size^2] int64``.
    """
    unit = merge_size * merge_size
    start = rows.start[::unit] // unit
    row, col = rows.row[::unit] // merge_size, rows.col[::unit] // merge_size
    height, width = rows.height[::unit] // merge_size, rows.width[::unit] // merge_size
    top, left = row // side * side, col // side * side
    window_height = (height - top).clamp(max=side)
    window_width = (width - left).clamp(max=side)
    return (
        start
        + top * width
        + left * window_height
        + (row - top) * window_width
        + (col - left)
    )


def invert_permutation(places: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `places`.

    Args:
        places: ``[n] int64``.
        index: ``[n]``: 0, 1, 2, ...
    """
    return torch.empty_like(places).scatter_(0, places, index.to(places.dtype))


def count_windows(height: int, width: int, side: int) -> int:
    """Windows of a frame of so many units."""
    return -(-height // side) * -(-width // side)


def max_windows(units: int, sequences: int, side: int) -> int:
    """No frames of so many units in total have more windows than this.

    A frame of h x w units has at most ``1 + h w / side`` windows: a strip of one
    row comes nearest.
    """
    return min(units, sequences + units // side)


@lru_cache(maxsize=1024)
def window_lengths(height: int, width: int, side: int) -> np.ndarray:
    """Units of each window of a frame, in order: ``[windows] int32``."""

    def cut(size: int) -> np.ndarray:
        return np.minimum(size - np.arange(0, size, side, dtype=np.int32), side)

    lengths = np.outer(cut(height), cut(width)).ravel()
    lengths.flags.writeable = False
    return lengths
