# SPDX-License-Identifier: Apache-2.0
"""Tiled towers that see an image whole (path "global") and in crops ("local").

Whole image and crops differ in size, so each path has graphs of its own; an
item joins the rows of both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.models.item_counts import unlike_counts
from vllm_encoder_cg.models.tiled_tower import Grid, TiledTowerAdapter, count_crops

GLOBAL, LOCAL = "global", "local"


class TwoPathAdapter(TiledTowerAdapter):
    """Exactly one global tile per item, and crops where the image was cut."""

    optional_paths = frozenset({LOCAL})

    @abstractmethod
    def random_cut(
        self, grids: Sequence[Grid | None], generator: torch.Generator
    ) -> dict[str, Any]:
        """Keyword arguments for images with these crops; None: without."""

    def random_images(
        self, grids: Sequence[Grid], generator: torch.Generator
    ) -> dict[str, Any]:
        cuts = [grid if count_crops(grid) else None for grid in grids]
        return self.random_cut(cuts, generator)

    def sample_images(
        self, shape: GraphShape, generator: torch.Generator
    ) -> dict[str, Any]:
        tiles, items = self.tile_capacity(shape), shape.capacity.items
        if shape.key.path == GLOBAL:
            return self.random_cut([None] * min(tiles, items), generator)
        if tiles == 1:  # processors cut into two or more
            return self.random_cut([(1, 1)], generator)
        # An image without crops comes first, where there is room for it.
        whole = [None] if items > 1 else []
        pairs = unlike_counts(tiles // 2, items - len(whole))
        cuts: list[Grid | None] = [*whole, *((2, count) for count in pairs[:-1])]
        cuts.append((tiles - 2 * sum(pairs[:-1]), 1))
        return self.random_cut(cuts, generator)

    def random_tiles(
        self, grids: Sequence[Grid | None], generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels of the whole images and of their crops."""
        crops = sum(grid[0] * grid[1] for grid in grids if grid)
        return (
            self.random_pixels(self.kinds[GLOBAL], len(grids), generator),
            self.random_pixels(self.kinds[LOCAL], crops, generator),
        )
