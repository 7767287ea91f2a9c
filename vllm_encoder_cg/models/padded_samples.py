# SPDX-License-Identifier: Apache-2.0
"""Sample input of padded towers, for warm-up, self-check and measurement."""

from __future__ import annotations

from collections.abc import Sequence

import torch

TokenGrid = tuple[int, int]
"""(rows, columns) of the tokens, or of the patches, of a row."""

_ASPECTS = (1.0, 1.33, 0.6, 1.78, 2.5)


def fit_grid(width: float, height: float, most: int) -> TokenGrid:
    """The grid of an image of this shape that has at most `most` cells."""
    scale = (most / (width * height)) ** 0.5
    rows = max(1, min(most, int(height * scale)))
    return rows, max(1, min(most // rows, int(width * scale)))


def sample_grid(most: int, seed: int) -> TokenGrid:
    """A grid of at most `most` cells; its shape changes with the seed."""
    return fit_grid(_ASPECTS[seed % len(_ASPECTS)], 1.0, most)


def random_padded_rows(
    grids: Sequence[TokenGrid],
    length: int,
    merge_size: int,
    values: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `length` patches: uniform values below 1, and places.

    Args:
        grids: the tokens of each row, of ``merge_size x merge_size`` patches.
        values: elements of a patch.

    Returns:
        ``[rows, length, values]``, 0 where a row is padded, and the (x, y) of each
        patch, ``[rows, length, 2] int64``, -1 there.
    """
    places = torch.full((len(grids), length, 2), -1, dtype=torch.int64)
    for row, (height, width) in enumerate(grids):
        y, x = torch.meshgrid(
            torch.arange(height * merge_size),
            torch.arange(width * merge_size),
            indexing="ij",
        )
        of_row = torch.stack([x, y], dim=-1).flatten(0, 1)
        places[row, : len(of_row)] = of_row
    places = places.to(generator.device)
    pixels = torch.rand(
        (len(grids), length, values), device=generator.device, generator=generator
    )
    pixels *= (places >= 0).all(-1, keepdim=True)
    return pixels.to(dtype), places
