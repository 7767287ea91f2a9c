# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL: packed tower whose patches lie row by row, and a projector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vllm_encoder_cg.models.fused.kimi_vl import FusedMoonVision
from vllm_encoder_cg.models.packed_batch import PackedArguments
from vllm_encoder_cg.models.packed_layout import Grid
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter


class KimiVLAdapter(PackedTowerAdapter):
    """``vision_tower`` takes positions, complex rotary factors, offsets and the
    order in which patches are merged ready-made."""

    architectures = ("KimiVLForConditionalGeneration",)
    pixel_keys: ClassVar[dict[str, str]] = {"image": "pixel_values"}
    grid_keys: ClassVar[dict[str, str]] = {"image": "image_grid_hws"}
    tower_attribute = "vision_tower"
    fused_tower = FusedMoonVision

    def unsupported_reason(self) -> str | None:
        reason = super().unsupported_reason()
        if reason is None and len(set(self.tower.merge_kernel_size)) > 1:
            return f"its merge kernel {self.tower.merge_kernel_size} is not square"
        return reason

    @property
    def attention_layer(self) -> Any:
        return self.tower.encoder.blocks[0].attn

    @property
    def merge_size(self) -> int:
        return self.tower.merge_kernel_size[0]

    @property
    def row_merge_size(self) -> int:
        return 1

    @property
    def out_hidden_size(self) -> int:
        return self.model.multi_modal_projector.linear_2.output_size

    @property
    def row_shape(self) -> tuple[int, ...]:
        """``[channels, patch height, patch width]``."""
        return tuple(self.tower.patch_embed.proj.weight.shape[1:])

    @property
    def max_side(self) -> int:
        rope = self.tower.encoder.rope_2d
        return min(rope.max_height, rope.max_width)

    def read_grids(self, value: Any) -> list[Grid]:
        rows = value.tolist() if isinstance(value, torch.Tensor) else value
        return [(1, int(h), int(w)) for h, w in rows]

    def make_grids(self, grids: Sequence[Grid]) -> torch.Tensor:
        return torch.tensor([(h, w) for _, h, w in grids])

    def tower_forward(self, arguments: PackedArguments) -> torch.Tensor:
        rows, attention = arguments.rows, arguments.attention
        positions = self.tower.patch_embed.pos_emb
        # Read as an attribute, the table is built at its first use: in the
        # uncaptured forward before a capture, if vLLM has not used it before.
        rope = self.tower.encoder.rope_2d.precomputed_freqs_cis
        merged = replace(arguments.geometry, merge_size=self.merge_size).rows
        features = self.captured_tower(
            arguments.pixels,
            None,
            encoder_metadata={
                "pos_embeds": arguments.geometry.bicubic_positions(
                    positions.weight.flatten(0, 1),
                    positions.height,
                    positions.width,
                    normalised=False,
                ),
                "rope_freqs_cis": rope[rows.row, rows.col],
                "cu_seqlens": attention.cu_seqlens,
                "max_seqlen": attention.max_seqlen,
                "row_total": arguments.row_total,
                "merge_gather_idx": merged.start
                + merged.row * merged.width
                + merged.col,
            },
        )
        return self.model.multi_modal_projector(features)

    def tower_eager(
        self, modality: str, pixels: torch.Tensor, grids: list[Grid]
    ) -> torch.Tensor:
        features = self.tower(pixels, self.make_grids(grids))
        return self.model.multi_modal_projector(torch.cat(features))
