# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: one tile per image, more with pan-and-scan."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_encoder_cg.models.fused.fusable import FusableAdapter
from vllm_encoder_cg.models.fused.gemma3 import FusedSiglipTower
from vllm_encoder_cg.models.one_path_tower import OnePathAdapter
from vllm_encoder_cg.models.tiled_tower import TileKind


class Gemma3Adapter(FusableAdapter, OnePathAdapter):
    """SigLIP, average pooling and a projection, tile by tile."""

    architectures = ("Gemma3ForConditionalGeneration",)
    tower_attribute = "vision_tower"
    fused_tower = FusedSiglipTower

    def tile_kind(self) -> TileKind:
        vision = self.model.config.vision_config
        return TileKind(
            buffer="pixel_values",
            side=vision.image_size,
            patches=(vision.image_size // vision.patch_size) ** 2,
            tokens=self.model.config.mm_tokens_per_image,
        )

    @property
    def out_hidden_size(self) -> int:
        return self.model.config.text_config.hidden_size

    def encode(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        return self._encode(pixels, self.tower)

    def captured_encode(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        return self._encode(pixels, self.captured_tower)

    def _encode(
        self, pixels: torch.Tensor, tower: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        return self.model.multi_modal_projector(tower(pixels)).flatten(0, 1)
