# SPDX-License-Identifier: Apache-2.0
"""A layer of SigLIP, and of towers that are built of the same, as a fused block."""

from __future__ import annotations

from typing import Any

from vllm_encoder_cg.models.fused.attention import FusedAttention
from vllm_encoder_cg.models.fused.blocks import FusedBlock, FusedMlp
from vllm_encoder_cg.models.fused.modules import Activation, Norm, expect


def siglip_block(layer: Any, kind: str, attention: str, mlp: str) -> FusedBlock:
    """
    Args:
        layer: of vLLM's class `kind`, whose parts are of classes `attention` and
            `mlp`.

    Raises:
        FusionRefusedError: it is not of these classes.
    """
    expect(layer, kind)
    expect(layer.self_attn, attention)
    expect(layer.mlp, mlp)
    attend, fc = layer.self_attn, layer.mlp
    return FusedBlock(
        Norm(layer.layer_norm1),
        FusedAttention(attend.qkv_proj, attend.attn, attend.out_proj),
        Norm(layer.layer_norm2),
        FusedMlp(fc.fc1, Activation(fc.activation_fn), fc.fc2),
    )
