# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL's vision tower, fused."""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg.models.attention_tables import AttentionArguments
from vllm_encoder_cg.models.fused.attention import (
    FusedAttention,
    Rotary,
    SequenceAttention,
)
from vllm_encoder_cg.models.fused.blocks import (
    FusedBlock,
    FusedMlp,
    needs_finite_padding,
    run_blocks,
)
from vllm_encoder_cg.models.fused.merger import FusedMerger
from vllm_encoder_cg.models.fused.modules import (
    Activation,
    Norm,
    expect,
    expect_unsharded,
)


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
        first, activation, second = tower.merger.mlp
        self._merger = FusedMerger(
            Norm(tower.merger.ln_q),
            tower.merger.hidden_size,
            FusedMlp(first, Activation(activation), second),
        )

    def __call__(
        self, pixels: torch.Tensor, grids: None, *, encoder_metadata: dict[str, Any]
    ) -> torch.Tensor:
        tower = self._tower
        hidden = tower.patch_embed(tower.input_norm(pixels, tower.dtype))
        attention = SequenceAttention(
            tower.blocks[0].attn.attn,
            AttentionArguments(
                encoder_metadata["cu_seqlens"], encoder_metadata["max_seqlen"]
            ),
            keep_finite=needs_finite_padding(self._blocks),
        )
        normed = run_blocks(
            self._blocks,
            hidden,
            None,
            Rotary(
                encoder_metadata["rotary_pos_emb_cos"],
                encoder_metadata["rotary_pos_emb_sin"],
                encoder_metadata["row_total"],
            ),
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
    attention, mlp = block.attn, block.mlp
    return FusedBlock(
        Norm(block.norm1),
        FusedAttention(attention.qkv, attention.attn, attention.proj),
        Norm(block.norm2),
        FusedMlp(mlp.fc1, Activation(mlp.act), mlp.fc2),
    )
