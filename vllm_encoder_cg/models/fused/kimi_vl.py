# SPDX-License-Identifier: Apache-2.0
"""Kimi-VL's vision tower, fused."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from vllm_encoder_cg.models.fused.attention import FusedAttention, Rotary
from vllm_encoder_cg.models.fused.blocks import (
    FusedBlock,
    FusedMlp,
    run_blocks,
    sequence_attention,
)
from vllm_encoder_cg.models.fused.modules import Activation, Norm, expect


class FusedMoonVision:
    """Called like vLLM's ``MoonVitPretrainedModel`` with ready-made metadata.

    Raises:
        FusionRefusedError: the tower has modules that are not known here.
    """

    def __init__(self, tower: Any) -> None:
        expect(tower, "MoonVitPretrainedModel")
        expect(tower.patch_embed, "MoonVisionPatchEmbed")
        expect(tower.patch_embed.proj, "Conv2dLayer")
        expect(tower.encoder, "MoonVitEncoder")
        self._tower = tower
        self._blocks = [_make_block(block) for block in tower.encoder.blocks]
        self._last_norm = Norm(tower.encoder.final_layernorm)

    def __call__(
        self, pixels: torch.Tensor, grids: None, *, encoder_metadata: dict[str, Any]
    ) -> torch.Tensor:
        tower = self._tower
        # A patch is as large as the convolution's kernel: a product.
        patches = tower.patch_embed.proj
        weight = patches.weight.flatten(1)
        hidden = F.linear(pixels.flatten(1).to(weight.dtype), weight, patches.bias)
        factors = torch.view_as_real(encoder_metadata["rope_freqs_cis"])
        attention = sequence_attention(self._blocks, encoder_metadata)
        hidden = run_blocks(
            self._blocks,
            hidden,
            encoder_metadata["pos_embeds"],
            Rotary(
                factors[..., 0],
                factors[..., 1],
                encoder_metadata["row_total"],
                interleaved=True,
            ),
            lambda index: attention,
            self._last_norm,
        )
        height, width = tower.merge_kernel_size
        merged = hidden.index_select(0, encoder_metadata["merge_gather_idx"])
        return merged.unflatten(0, (-1, height * width))


def _make_block(block: Any) -> FusedBlock:
    expect(block, "MoonVitEncoderLayer")
    expect(block.mlp, "MLP2")
    mlp = block.mlp
    return FusedBlock(
        Norm(block.norm0),
        FusedAttention(block.wqkv, block.attn, block.wo),
        Norm(block.norm1),
        FusedMlp(mlp.fc0, Activation(mlp.activation), mlp.fc1),
    )
