# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL's vision tower, fused."""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg.models.fused.attention import Rotary
from vllm_encoder_cg.models.fused.blocks import (
    FusedBlock,
    FusedMlp,
    run_blocks,
    sequence_attention,
)
from vllm_encoder_cg.models.fused.merger import FusedMerger
from vllm_encoder_cg.models.fused.modules import Activation, expect, expect_unsharded


class FusedQwen2Vision:
    """Called like vLLM's ``Qwen2VisionTransformer`` with ready-made metadata.

    Raises:
        FusionRefusedError: the tower has modules that are not known here.
    """

    def __init__(self, tower: Any) -> None:
        expect(tower, "Qwen2VisionTransformer")
        expect(tower.merger, "Qwen2VisionPatchMerger")
        self._tower = tower
        self._blocks = [_make_block(block) for block in tower.blocks]
        self._merger = FusedMerger.of_norm_first(tower.merger)

    def __call__(
        self, pixels: torch.Tensor, grids: None, *, encoder_metadata: dict[str, Any]
    ) -> torch.Tensor:
        tower = self._tower
        hidden = tower.patch_embed(tower.input_norm(pixels, tower.dtype))
        attention = sequence_attention(self._blocks, encoder_metadata)
        normed = run_blocks(
            self._blocks,
            hidden,
            None,
            Rotary.of(encoder_metadata),
            lambda index: attention,
            self._merger.norm,
        )
        return self._merger.project(normed)


def _make_block(block: Any) -> FusedBlock:
    expect(block, "Qwen2VisionBlock")
    expect(block.attn, "Qwen2VisionAttention")
    expect(block.mlp, "Qwen2VisionMLP")
    # A sharded projection is not laid out by heads there.
    expect_unsharded(block.attn)
    mlp = block.mlp
    return FusedBlock.of(block, FusedMlp(mlp.fc1, Activation(mlp.act), mlp.fc2))
