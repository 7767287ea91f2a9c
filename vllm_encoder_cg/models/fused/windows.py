# SPDX-License-Identifier: Apache-2.0
"""Attention inside windows so small that each is one tile."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm_encoder_cg.kernels.reference import MAX_WINDOW_ROWS
from vllm_encoder_cg.models.attention_tables import AttentionArguments
from vllm_encoder_cg.models.fused.attention import Rotary, SequenceAttention


class WindowAttention(SequenceAttention):
    """Rotates and attends in one kernel where it can; else as its base.

    Args:
        rows: of the largest window.
    """

    direct_windows: ClassVar[bool] = True
    """Whether to use that kernel."""

    def __init__(
        self,
        layer: Any,
        arguments: AttentionArguments,
        rows: int,
        *,
        keep_finite: bool,
    ) -> None:
        super().__init__(layer, arguments, keep_finite=keep_finite)
        self._in_one_tile = (
            self.direct_windows and self.own_kernels and rows <= MAX_WINDOW_ROWS
        )

    def on_projection(
        self, layer: Any, packed: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        if not self._in_one_tile or rotary.interleaved:
            return super().on_projection(layer, packed, rotary)
        from vllm_encoder_cg.kernels.window_attention import window_attention

        return window_attention(
            packed, rotary.cos, rotary.sin, layer.num_heads, self.starts, layer.scale
        )
