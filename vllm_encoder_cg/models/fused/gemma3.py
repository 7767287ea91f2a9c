# SPDX-License-Identifier: Apache-2.0
"""Gemma 3's vision transformer, which is SigLIP's, fused."""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg.models.fused.attention import TileAttention
from vllm_encoder_cg.models.fused.blocks import run_alike
from vllm_encoder_cg.models.fused.modules import FusionRefusedError, Norm, expect
from vllm_encoder_cg.models.fused.siglip_layer import siglip_block


class FusedSiglipTower:
    """Called like vLLM's ``SiglipVisionModel``, on pixels alone.

    Args:
        tower: that model.

    Raises:
        FusionRefusedError: the tower has modules that are not known here.
    """

    def __init__(self, tower: Any) -> None:
        expect(tower, "SiglipVisionModel")
        vision = tower.vision_model
        expect(vision, "SiglipVisionTransformer")
        expect(vision.encoder, "SiglipEncoder")
        if vision.head is not None:
            raise FusionRefusedError("its patches are pooled by an attention head")
        self._embeddings = vision.embeddings
        layers = vision.encoder.layers
        self._attention = layers[0].self_attn.attn
        self._blocks = [
            siglip_block(layer, "SiglipEncoderLayer", "SiglipAttention", "SiglipMLP")
            for layer in layers
        ]
        last = vision.post_layernorm
        self._last_norm = None if last is None else Norm(last)

    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """``[tiles, 3, side, side]``: ``[tiles, patches, width]``."""
        hidden = self._embeddings(pixel_values)
        tiles, patches, _ = hidden.shape
        attention = TileAttention(self._attention, tiles, patches, hidden.device)
        return run_alike(self._blocks, hidden, attention, self._last_norm)
