# SPDX-License-Identifier: Apache-2.0
"""ERNIE-4.5-VL's vision tower, fused."""

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
from vllm_encoder_cg.models.fused.modules import (
    Activation,
    Norm,
    expect,
    expect_unsharded,
)


class FusedErnieVision:
    """Called like vLLM's ``Ernie4_5_VisionTransformer`` with ready-made metadata.

    Raises:
        FusionRefusedError: the tower has modules that are not known here.
    """

    def __init__(self, tower: Any) -> None:
        expect(tower, "Ernie4_5_VisionTransformer")
        self._tower = tower
        self._blocks = [_make_block(block) for block in tower.blocks]
        self._last_norm = Norm(tower.ln)

    def __call__(
        self, pixels: torch.Tensor, *, encoder_metadata: dict[str, Any]
    ) -> torch.Tensor:
        tower = self._tower
        angles = encoder_metadata["rotary_pos_emb"]
        attention = sequence_attention(self._blocks, encoder_metadata)
        return run_blocks(
            self._blocks,
            tower.patch_embed(pixels),
            None,
            # Once for all layers, which vLLM's blocks do anew each.
            Rotary(angles.cos(), angles.sin(), encoder_metadata["row_total"]),
            lambda index: attention,
            self._last_norm,
        )


def _make_block(block: Any) -> FusedBlock:
    expect(block, "Ernie4_5_VisionBlock")
    expect(block.attn, "Ernie4_5_VisionAttention")
    expect(block.mlp, "Ernie4_5_VisionMLP")
    # A sharded projection is gathered and split anew there.
    expect_unsharded(block.attn)
    mlp = block.mlp
    return FusedBlock.of(block, FusedMlp(mlp.fc1, Activation(mlp.act), mlp.fc2))
