# SPDX-License-Identifier: Apache-2.0
"""Llama 4: images as tiles with a thumbnail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from vllm_encoder_cg.models.one_path_tower import OnePathAdapter
from vllm_encoder_cg.models.tiled_tower import TileKind


class Llama4Adapter(OnePathAdapter):
    """Tower and projector tile by tile; separators between tiles are text."""

    architectures = ("Llama4ForConditionalGeneration",)
    count_keys: ClassVar[dict[str, str]] = {"image": "patches_per_image"}

    def unsupported_reason(self) -> str | None:
        refusal = super().unsupported_reason()
        if refusal is None and self.model.use_data_parallel:
            ranks = self.vllm_config.parallel_config.tensor_parallel_size
            if ranks > 1:
                # The ranks encode different images, but the projector gathers
                # its output columns over them all the same.
                return (
                    "its projector communicates between ranks although "
                    '--mm-encoder-tp-mode is "data"; set that to "weights" to use '
                    "graphs"
                )
        return refusal

    def tile_kind(self) -> TileKind:
        vision = self.model.config.vision_config
        side = vision.image_size // vision.patch_size
        return TileKind(
            buffer="pixel_values",
            side=vision.image_size,
            patches=side**2,
            tokens=int(side * vision.pixel_shuffle_ratio) ** 2,
        )

    @property
    def out_hidden_size(self) -> int:
        return self.model.config.text_config.hidden_size

    def encode(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        return self.model.multi_modal_projector(self.tower(pixels)).flatten(0, 1)

    def random_items(
        self, modality: str, counts: Sequence[int], generator: torch.Generator
    ) -> dict[str, Any]:
        # (rows, columns) of the crops; the encoder does not look at them.
        ratios = [(1, max(1, count - 1)) for count in counts]
        items = super().random_items(modality, counts, generator)
        return items | {"aspect_ratios": torch.tensor(ratios)}
