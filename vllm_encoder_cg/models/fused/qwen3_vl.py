# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL's and Qwen3.5's vision tower, fused."""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg.models.fused.alongside import Alongside
from vllm_encoder_cg.models.fused.attention import Rotary
from vllm_encoder_cg.models.fused.blocks import (
    FusedBlock,
    FusedMlp,
    run_blocks,
    sequence_attention,
)
from vllm_encoder_cg.models.fused.merger import FusedMerger
from vllm_encoder_cg.models.fused.modules import Activation, Norm, expect


class FusedQwen3Vision:
    """Called like vLLM's ``Qwen3_VisionTransformer`` with ready-made metadata.

    Raises:
        FusionRefusedError: the tower has modules that are not known here.
    """

    def __init__(self, tower: Any) -> None:
        expect(tower, "Qwen3_VisionTransformer")
        self._tower = tower
        self._blocks = [_make_block(block) for block in tower.blocks]
        self._merger = _make_merger(tower.merger)
        # Their norms come after the patches of a token lie side by side.
        self._level_mergers = [_make_merger(m) for m in tower.deepstack_merger_list]
        self._alongside = Alongside(
            tower.device, apart=all(merger.is_plain for merger in self._level_mergers)
        )

    def __call__(
        self, pixels: torch.Tensor, grids: None, *, encoder_metadata: dict[str, Any]
    ) -> torch.Tensor:
        tower = self._tower
        hidden = tower.patch_embed(tower.input_norm(pixels, tower.dtype))
        attention = sequence_attention(self._blocks, encoder_metadata)
        levels: list[torch.Tensor] = []

        def take_level(index: int, output: torch.Tensor) -> None:
            if index in tower.deepstack_visual_indexes:
                level = tower.deepstack_visual_indexes.index(index)
                merger = self._level_mergers[level]
                levels.append(self._alongside.run(merger.merge_then_norm, output))

        normed = run_blocks(
            self._blocks,
            hidden,
            encoder_metadata["pos_embeds"],
            Rotary.of(encoder_metadata),
            lambda index: attention,
            self._merger.norm,
            take_level,
        )
        merged = self._merger.project(normed)
        self._alongside.join()
        return torch.cat([merged, *levels], dim=1) if levels else merged


def _make_merger(module: Any) -> FusedMerger:
    expect(module, "Qwen3_VisionPatchMerger")
    mlp = FusedMlp(module.linear_fc1, Activation(module.act_fn), module.linear_fc2)
    return FusedMerger(Norm(module.norm), module.hidden_size, mlp)


def _make_block(block: Any) -> FusedBlock:
    expect(block, "Qwen3_VisionBlock")
    expect(block.attn, "Qwen2_5_VisionAttention")
    expect(block.mlp, "Qwen3_VisionMLP")
    mlp = block.mlp
    return FusedBlock.of(
        block, FusedMlp(mlp.linear_fc1, Activation(mlp.act_fn), mlp.linear_fc2)
    )
