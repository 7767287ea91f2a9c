# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL and Qwen3.5: packed tower with interpolated positions."""

from __future__ import annotations

import torch

from vllm_encoder_cg.models.fused.qwen3_vl import FusedQwen3Vision
from vllm_encoder_cg.models.packed_batch import PackedArguments
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter


class Qwen3VLAdapter(PackedTowerAdapter):
    """``visual`` takes positions, rotary tables and offsets ready-made; its
    output rows hold the merged features and those of the deepstack levels, of
    which Qwen3.5 has none."""

    architectures = (
        "Qwen3VLForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    )
    passes_sequence_lengths = True
    fused_tower = FusedQwen3Vision

    def tower_forward(self, arguments: PackedArguments) -> torch.Tensor:
        geometry, attention = arguments.geometry, arguments.attention
        cos, sin = geometry.rotary_tables(self.tower.rotary_pos_emb.cos_sin_cache)
        return self.captured_tower(
            arguments.pixels,
            None,
            encoder_metadata={
                "pos_embeds": geometry.bilinear_positions(
                    self.tower.pos_embed.weight, self.tower.num_grid_per_side
                ),
                "rotary_pos_emb_cos": cos,
                "rotary_pos_emb_sin": sin,
                "cu_seqlens": attention.cu_seqlens,
                "max_seqlen": attention.max_seqlen,
                "sequence_lengths": attention.sequence_lengths,
                "row_total": arguments.row_total,
            },
        )
