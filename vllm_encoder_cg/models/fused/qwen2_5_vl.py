# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL's vision tower, fused."""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg.models.attention_tables import AttentionArguments
from vllm_encoder_cg.models.fused.attention import Rotary, SequenceAttention
from vllm_encoder_cg.models.fused.blocks import (
    FusedBlock,
    FusedMlp,
    needs_finite_padding,
    run_blocks,
)
from vllm_encoder_cg.models.fused.merger import FusedMerger
from vllm_encoder_cg.models.fused.modules import Activation, FusionRefusedError, expect
from vllm_encoder_cg.models.fused.windows import WindowAttention


class FusedQwen25Vision:
    """Called like vLLM's ``Qwen2_5_VisionTransformer`` with ready-made metadata.

    Raises:
        FusionRefusedError: the tower has modules that are not known here, or
            computes in float16, where vLLM clips what overflows behind the last
            block.
    """

    def __init__(self, tower: Any) -> None:
        expect(tower, "Qwen2_5_VisionTransformer")
        expect(tower.merger, "Qwen2_5_VisionPatchMerger")
        if tower.dtype == torch.float16:
            raise FusionRefusedError("it computes in float16; use bfloat16")
        self._tower = tower
        self._blocks = [_make_block(block) for block in tower.blocks]
        self._merger = FusedMerger.of_norm_first(tower.merger)

    def __call__(
        self, pixels: torch.Tensor, grids: None, *, encoder_metadata: dict[str, Any]
    ) -> torch.Tensor:
        tower = self._tower
        hidden = tower.patch_embed(tower.input_norm(pixels, tower.dtype))
        units = hidden.unflatten(0, (-1, tower.spatial_merge_unit))
        hidden = units[encoder_metadata["window_index"]].flatten(0, 1)
        layer = tower.blocks[0].attn.attn
        keep_finite = needs_finite_padding(self._blocks)
        full = SequenceAttention(
            layer,
            AttentionArguments(
                encoder_metadata["cu_seqlens"],
                encoder_metadata["max_seqlen_full"],
                encoder_metadata["sequence_lengths_full"],
            ),
            keep_finite=keep_finite,
        )
        windows = WindowAttention(
            layer,
            AttentionArguments(
                encoder_metadata["cu_window_seqlens"],
                encoder_metadata["max_seqlen_window"],
                encoder_metadata["sequence_lengths_window"],
            ),
            (tower.window_size // tower.patch_size) ** 2,
            keep_finite=keep_finite,
        )
        normed = run_blocks(
            self._blocks,
            hidden,
            None,
            Rotary.of(encoder_metadata),
            lambda index: full if index in tower.fullatt_block_indexes else windows,
            self._merger.norm,
        )
        return self._merger.project(normed)[encoder_metadata["reverse_indices"]]


def _make_block(block: Any) -> FusedBlock:
    expect(block, "Qwen2_5_VisionBlock")
    expect(block.attn, "Qwen2_5_VisionAttention")
    expect(block.mlp, "Qwen2_5_VisionMLP")
    mlp = block.mlp
    return FusedBlock.of(
        block, FusedMlp(mlp.gate_up_proj, Activation(mlp.act_fn), mlp.down_proj)
    )
