# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V: packed tower with bicubic positions."""

from __future__ import annotations

import torch

from vllm_encoder_cg.models.fused.glm4v import FusedGlm4Vision
from vllm_encoder_cg.models.packed_batch import PackedArguments
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter


class Glm4vAdapter(PackedTowerAdapter):
    """``visual`` takes positions, rotary tables and offsets ready-made."""

    architectures = ("Glm4vForConditionalGeneration",)
    fused_tower = FusedGlm4Vision

    def tower_forward(self, arguments: PackedArguments) -> torch.Tensor:
        geometry, attention = arguments.geometry, arguments.attention
        cos, sin = geometry.rotary_tables(self.tower.rotary_pos_emb.cos_sin_cache)
        table = self.tower.embeddings.position_embedding.weight
        side = int(table.shape[0] ** 0.5)
        return self.captured_tower(
            arguments.pixels,
            None,
            encoder_metadata={
                "pos_embeds": geometry.bicubic_positions(
                    table, side, side, normalised=True
                ),
                "rotary_pos_emb_cos": cos,
                "rotary_pos_emb_sin": sin,
                "cu_seqlens": attention.cu_seqlens,
                "max_seqlen": attention.max_seqlen,
                "row_total": arguments.row_total,
            },
        )
