# SPDX-License-Identifier: Apache-2.0
"""InternVL's vision transformer, fused."""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg.models.fused.attention import FusedAttention, TileAttention
from vllm_encoder_cg.models.fused.blocks import FusedBlock, FusedMlp, run_alike
from vllm_encoder_cg.models.fused.modules import (
    Activation,
    Norm,
    expect,
    expect_unsharded,
)


class FusedInternEncoder:
    """Called like vLLM's ``InternVisionEncoder``.

    Args:
        tower: vLLM's ``InternVisionModel``.

    Raises:
        FusionRefusedError: the tower has modules that are not known here.
    """

    def __init__(self, tower: Any) -> None:
        expect(tower, "InternVisionModel")
        expect(tower.encoder, "InternVisionEncoder")
        self._layer = tower.encoder.layers[0].attn.attn
        self._blocks = [_make_block(layer) for layer in tower.encoder.layers]

    def __call__(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        tiles, rows, _ = inputs_embeds.shape
        attention = TileAttention(self._layer, tiles, rows, inputs_embeds.device)
        return run_alike(self._blocks, inputs_embeds, attention, None)


def _make_block(layer: Any) -> FusedBlock:
    expect(layer, "InternVisionEncoderLayer")
    expect(layer.attn, "InternParallelAttention")
    expect(layer.mlp, "InternMLP")
    attention, mlp = layer.attn, layer.mlp
    q_norm = k_norm = None
    if attention.qk_normalization:
        # Sharded heads are gathered for their common norm there.
        expect_unsharded(attention)
        q_norm, k_norm = Norm(attention.q_norm), Norm(attention.k_norm)
    return FusedBlock(
        Norm(layer.norm1),
        FusedAttention(attention.qkv, attention.attn, attention.proj, q_norm, k_norm),
        Norm(layer.norm2),
        FusedMlp(mlp.fc1, Activation(mlp.activation_fn), mlp.fc2),
        layer.ls1,
        layer.ls2,
    )
