# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V's vision tower, fused."""

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
from vllm_encoder_cg.models.fused.modules import Activation, Norm, expect


class FusedGlm4Vision:
    """Called like vLLM's ``Glm4vVisionTransformer`` with ready-made metadata.

    The convolution and the merger behind the blocks are vLLM's own: they see a
    quarter of the rows.

    Raises:
        FusionRefusedError: the tower has modules that are not known here.
    """

    def __init__(self, tower: Any) -> None:
        expect(tower, "Glm4vVisionTransformer")
        self._tower = tower
        self._blocks = [_make_block(block) for block in tower.blocks]
        self._first_norm = Norm(tower.post_conv_layernorm)
        self._last_norm = Norm(tower.post_layernorm)

    def __call__(
        self, pixels: torch.Tensor, grids: None, *, encoder_metadata: dict[str, Any]
    ) -> torch.Tensor:
        tower = self._tower
        hidden = tower.patch_embed(tower.input_norm(pixels, tower.dtype))
        attention = sequence_attention(self._blocks, encoder_metadata)
        hidden = run_blocks(
            self._blocks,
            self._first_norm(hidden),
            encoder_metadata["pos_embeds"],
            Rotary.of(encoder_metadata),
            lambda index: attention,
            self._last_norm,
        )
        side = tower.spatial_merge_size
        squares = hidden.unflatten(0, (-1, side, side)).permute(0, 3, 1, 2)
        return tower.merger(tower.downsample(squares).view(-1, tower.out_hidden_size))


def _make_block(block: Any) -> FusedBlock:
    expect(block, "Glm4vVisionBlock")
    expect(block.attn, "Glm4vVisionAttention")
    expect(block.mlp, "Glm4vVisionMLP")
    mlp = block.mlp
    return FusedBlock.of(
        block, FusedMlp(mlp.gate_up_proj, Activation(mlp.act_fn), mlp.down_proj)
    )
