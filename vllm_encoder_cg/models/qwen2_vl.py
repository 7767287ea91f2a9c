# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL: the plainest packed tower, with rotary positions only."""

from __future__ import annotations

import torch

from vllm_encoder_cg.models.fused.qwen2_vl import FusedQwen2Vision
from vllm_encoder_cg.models.packed_batch import PackedArguments
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter


class Qwen2VLAdapter(PackedTowerAdapter):
    """``visual`` takes rotary tables and offsets ready-made."""

    architectures = ("Qwen2VLForConditionalGeneration",)
    fused_tower = FusedQwen2Vision

    def tower_forward(self, arguments: PackedArguments) -> torch.Tensor:
        cos, sin = arguments.geometry.rotary_tables(
            self.tower.rotary_pos_emb.cos_sin_cache
        )
        return self.captured_tower(
            arguments.pixels,
            None,
            encoder_metadata={
                "rotary_pos_emb_cos": cos,
                "rotary_pos_emb_sin": sin,
                "cu_seqlens": arguments.attention.cu_seqlens,
                "max_seqlen": arguments.attention.max_seqlen,
                "row_total": arguments.row_total,
            },
        )
