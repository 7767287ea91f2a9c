# SPDX-License-Identifier: Apache-2.0
"""Tiled towers through which every tile of an item goes the same way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.definitions import DEFAULT_PATH
from vllm_encoder_cg.models.item_counts import read_counts, unlike_counts
from vllm_encoder_cg.models.tiled_tower import (
    Grid,
    TiledItems,
    TiledTowerAdapter,
    TileKind,
    Tiles,
    count_crops,
)


class OnePathAdapter(TiledTowerAdapter):
    """An item's tiles are the whole image, and its crops where it was cut; or the
    frames of a video."""

    pixel_keys: ClassVar[dict[str, str]] = {"image": "pixel_values"}
    count_keys: ClassVar[dict[str, str]] = {"image": "num_patches"}

    @abstractmethod
    def tile_kind(self) -> TileKind:
        """The only kind of tile."""

    def tile_kinds(self) -> dict[str, TileKind]:
        return {DEFAULT_PATH: self.tile_kind()}

    def read_items(self, mm_kwargs: dict[str, Any]) -> tuple[str, TiledItems] | None:
        present = [m for m, key in self.pixel_keys.items() if key in mm_kwargs]
        if len(present) != 1:
            return None
        modality = present[0]
        pixels = mm_kwargs[self.pixel_keys[modality]]
        counts = read_counts(mm_kwargs.get(self.count_keys[modality]))
        if counts is None or not isinstance(pixels, torch.Tensor):
            return None
        return modality, TiledItems({DEFAULT_PATH: Tiles(pixels, counts)})

    def random_items(
        self, modality: str, counts: Sequence[int], generator: torch.Generator
    ) -> dict[str, Any]:
        """Keyword arguments for items of so many tiles."""
        kind = self.kinds[DEFAULT_PATH]
        return {
            self.pixel_keys[modality]: self.random_pixels(kind, sum(counts), generator),
            self.count_keys[modality]: torch.tensor(counts),
        }

    def random_images(
        self, grids: Sequence[Grid], generator: torch.Generator
    ) -> dict[str, Any]:
        counts = [1 + count_crops(grid) for grid in grids]
        return self.random_items("image", counts, generator)

    def random_videos(
        self, frames: Sequence[int], generator: torch.Generator
    ) -> dict[str, Any]:
        if "video" not in self.modalities:
            return super().random_videos(frames, generator)
        return self.random_items("video", frames, generator)

    def sample_images(
        self, shape: GraphShape, generator: torch.Generator
    ) -> dict[str, Any]:
        counts = unlike_counts(self.tile_capacity(shape), shape.capacity.items)
        return self.random_items("image", counts, generator)
