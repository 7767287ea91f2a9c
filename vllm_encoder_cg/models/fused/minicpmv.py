# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V's vision transformer, which is Idefics 2's, fused.

vLLM masks the padding of a row, which leaves attention to the slowest of PyTorch's
kernels.  Here the patches of a row are one sequence of variable-length attention and
its padding is another, which nothing reads.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg.models.attention_tables import AttentionArguments
from vllm_encoder_cg.models.fused.attention import ROW_OFFSETS, SequenceAttention
from vllm_encoder_cg.models.fused.blocks import run_alike
from vllm_encoder_cg.models.fused.modules import FusionRefusedError, Norm, expect
from vllm_encoder_cg.models.fused.siglip_layer import siglip_block

_BACKENDS = (*ROW_OFFSETS, "TORCH_SDPA")
"""Whose ``cu_seqlens`` the forward can compute.  TORCH_SDPA reads them on the host,
which only a CPU can."""


class FusedIdefics2Encoder:
    """Encoder and last norm of vLLM's ``Idefics2VisionTransformer``.

    Args:
        tower: that transformer.

    Raises:
        FusionRefusedError: the tower has modules that are not known here, or its
            attention backend takes other tables.
    """

    def __init__(self, tower: Any) -> None:
        expect(tower, "Idefics2VisionTransformer")
        expect(tower.encoder, "Idefics2Encoder")
        layers = tower.encoder.layers
        self.attention = layers[0].self_attn.attn
        """vLLM's layer, whose backend all have."""
        for layer in layers:
            # vLLM itself leaves it out, and masks.
            expect(layer.self_attn.attn, "MMEncoderAttention")
        backend = self.attention.attn_backend.name
        if backend not in _BACKENDS:
            raise FusionRefusedError(
                f"{backend} takes tables that a graph cannot make of grids; use "
                "--mm-encoder-attn-backend FLASH_ATTN"
            )
        self._blocks = [
            siglip_block(
                layer,
                "Idefics2EncoderLayer",
                "Idefics2VisionAttention",
                "Idefics2VisionMLP",
            )
            for layer in layers
        ]
        last = tower.post_layernorm
        self._last_norm = None if isinstance(last, torch.nn.Identity) else Norm(last)

    def __call__(self, hidden: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden: ``[rows, length, width]``, finite.
            patches: ``[rows]`` on the device: how many of each row are no padding.

        Returns:
            ``[rows, length, width]``.
        """
        rows, length, _ = hidden.shape
        attention = SequenceAttention(
            self.attention,
            AttentionArguments(
                _starts(rows, length, patches), torch.tensor(length, dtype=torch.int32)
            ),
            keep_finite=False,
        )
        return run_alike(self._blocks, hidden, attention, self._last_norm)


def _starts(rows: int, length: int, patches: torch.Tensor) -> torch.Tensor:
    """``[2 * rows + 1] int32``: where each row's patches begin, and its padding."""
    begin = torch.arange(0, rows * length + 1, length, device=patches.device)
    starts = torch.stack([begin[:-1], begin[:-1] + patches], dim=1).flatten()
    return torch.cat([starts, begin[-1:]]).int()
