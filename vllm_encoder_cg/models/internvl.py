# SPDX-License-Identifier: Apache-2.0
"""InternVL 2, 2.5, 3, 3.5: images as tiles with a thumbnail, videos as frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from vllm_encoder_cg.models.fused.fusable import FusableAdapter
from vllm_encoder_cg.models.fused.internvl import FusedInternEncoder
from vllm_encoder_cg.models.one_path_tower import OnePathAdapter
from vllm_encoder_cg.models.tiled_tower import TileKind


class InternVLAdapter(FusableAdapter, OnePathAdapter):
    """A frame of a video is a tile: both modalities share the graphs."""

    architectures = ("InternVLChatModel",)
    modalities = ("image", "video")
    fused_tower = FusedInternEncoder
    pixel_keys: ClassVar[dict[str, str]] = {
        "image": "pixel_values_flat",
        "video": "pixel_values_flat_video",
    }
    count_keys: ClassVar[dict[str, str]] = {
        "image": "image_num_patches",
        "video": "video_num_patches",
    }

    def tile_kind(self) -> TileKind:
        vision = self.model.config.vision_config
        side = vision.image_size // vision.patch_size
        return TileKind(
            buffer="pixel_values_flat",
            side=vision.image_size,
            patches=side**2,
            tokens=int(side * self.model.downsample_ratio) ** 2,
        )

    @property
    def out_hidden_size(self) -> int:
        return self.model.config.text_config.hidden_size

    def encode(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        return self._encode(pixels, self.tower.encoder)

    def captured_encode(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        encoder = self.captured_tower if self.fused else self.tower.encoder
        return self._encode(pixels, encoder)

    def _encode(
        self, pixels: torch.Tensor, encoder: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        # The tower's own forward would shard the tiles over the ranks once more
        # where encoders are data parallel; its parts do not.
        hidden = encoder(inputs_embeds=self.tower.embeddings(pixels))[:, 1:]
        side = int(hidden.shape[1] ** 0.5)
        hidden = self.model.pixel_shuffle(
            hidden.unflatten(1, (side, side)),
            scale_factor=self.model.downsample_ratio,
        )
        return self.model.mlp1(hidden.flatten(1, 2)).flatten(0, 1)

    def random_items(
        self, modality: str, counts: Sequence[int], generator: torch.Generator
    ) -> dict[str, Any]:
        # The model keeps the token's id while it reads a batch, and that is all.
        items = super().random_items(modality, counts, generator)
        return items | {f"{modality}_token_id": torch.tensor(0)}
