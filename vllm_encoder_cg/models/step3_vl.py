# SPDX-License-Identifier: Apache-2.0
"""Step3-VL: the whole image and its crops through one tower at two sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_encoder_cg.adapter import EncoderBatch
from vllm_encoder_cg.models.item_counts import read_counts
from vllm_encoder_cg.models.tiled_tower import Grid, TiledItems, TileKind, Tiles
from vllm_encoder_cg.models.two_path_tower import GLOBAL, LOCAL, TwoPathAdapter

_CROP_SIDE = 504
"""vLLM's processor has no setting for it."""
_EXTRA_ROWS = 4
"""Copies of the class token in front of the patches."""


class Step3VLAdapter(TwoPathAdapter):
    """An item is its crops' rows, then the whole image's."""

    architectures = ("Step3VLForConditionalGeneration",)

    def tile_kinds(self) -> dict[str, TileKind]:
        whole = self.model.config.vision_config.image_size
        return {
            GLOBAL: self._kind("pixel_values", whole),
            LOCAL: self._kind("patch_pixel_values", _CROP_SIDE),
        }

    def _kind(self, buffer: str, side: int) -> TileKind:
        config = self.model.config
        grid = side // config.vision_config.patch_size
        # Two convolutions: kernel 2 without padding, kernel 3 with stride 2.
        once = (grid - 2) // config.understand_projector_stride + 1
        twice = (once - 1) // 2 + 1
        return TileKind(buffer, side, grid**2, twice**2)

    @property
    def out_hidden_size(self) -> int:
        return self.model.config.hidden_size

    def read_items(self, mm_kwargs: dict[str, Any]) -> tuple[str, TiledItems] | None:
        whole = mm_kwargs.get("pixel_values")
        crops = mm_kwargs.get("patch_pixel_values")
        counts = read_counts(mm_kwargs.get("num_patches"))
        if not isinstance(whole, torch.Tensor) or not isinstance(crops, torch.Tensor):
            return None
        if counts is None:
            return None
        tiles = {GLOBAL: Tiles(whole, [1] * len(counts)), LOCAL: Tiles(crops, counts)}
        return "image", TiledItems(tiles)

    def encode(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        # The tower's own forward would shard the tiles over the ranks once more
        # where encoders are data parallel; its parts do not.
        tower = self.tower
        hidden = tower.transformer(inputs_embeds=tower.embeddings(pixels))
        hidden = hidden[:, _EXTRA_ROWS:]
        return self.model._process_image_features(hidden).flatten(0, 1)

    def assemble(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        outputs: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        specs = [batch.specs[i] for i in indices]
        whole = outputs[GLOBAL].split(self.kinds[GLOBAL].tokens)
        pieces = list(whole)
        if LOCAL in outputs:
            counts = [spec.get_path_output_tokens(LOCAL) for spec in specs]
            crops = outputs[LOCAL].split(counts)
            pieces = [
                piece for pair in zip(crops, whole, strict=True) for piece in pair
            ]
        return list(torch.cat(pieces).split([spec.output_tokens for spec in specs]))

    def random_cut(
        self, grids: Sequence[Grid | None], generator: torch.Generator
    ) -> dict[str, Any]:
        whole, crops = self.random_tiles(grids, generator)
        counts = [grid[0] * grid[1] if grid else 0 for grid in grids]
        return {
            "pixel_values": whole,
            "patch_pixel_values": crops,
            "num_patches": torch.tensor(counts),
        }
