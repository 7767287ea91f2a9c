# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL: packed tower with interpolated positions and deepstack outputs."""

from __future__ import annotations

import torch

from vllm_encoder_cg.models.attention_tables import AttentionArguments
from vllm_encoder_cg.models.grid_rows import GridRows, bilinear_positions, rotary_2d
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter


class Qwen3VLAdapter(PackedTowerAdapter):
    """``visual`` takes positions, rotary tables and offsets ready-made; its
    output rows hold the merged features and those of the deepstack levels."""

    architectures = ("Qwen3VLForConditionalGeneration",)

    def tower_forward(
        self,
        pixels: torch.Tensor,
        rows: GridRows,
        attention: AttentionArguments,
    ) -> torch.Tensor:
        cos, sin = self.tower.rotary_pos_emb.cos_sin_cache.chunk(2, dim=-1)
        rotary_cos, rotary_sin = rotary_2d(cos, sin, rows)
        return self.tower(
            pixels,
            None,
            encoder_metadata={
                "pos_embeds": bilinear_positions(
                    self.tower.pos_embed.weight, self.tower.num_grid_per_side, rows
                ),
                "rotary_pos_emb_cos": rotary_cos,
                "rotary_pos_emb_sin": rotary_sin,
                "cu_seqlens": attention.cu_seqlens,
                "max_seqlen": attention.max_seqlen,
                "sequence_lengths": attention.sequence_lengths,
            },
        )
