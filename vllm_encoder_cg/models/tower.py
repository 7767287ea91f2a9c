# SPDX-License-Identifier: Apache-2.0
"""What the adapters of all families of towers have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm_encoder_cg.adapter import EncoderAdapter
from vllm_encoder_cg.models.refusals import tower_refusal
from vllm_encoder_cg.quantized_linears import quantization_refusal


class TowerAdapter(EncoderAdapter):
    """Base of the adapters in this folder, of whichever family."""

    tower_attribute: ClassVar[str]
    """The model's attribute that is its vision tower."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self.tower: Any = getattr(model, self.tower_attribute, None)

    def unsupported_reason(self) -> str | None:
        return tower_refusal(self.tower, self.vllm_config) or quantization_refusal(
            self.model
        )

    @property
    def device(self) -> torch.device:
        return next(self.tower.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.vllm_config.model_config.dtype

    @property
    def most_tokens(self) -> int:
        """Above it no automatic budget is worth a graph: the lesser of
        ``max_num_batched_tokens`` and ``max_model_len``."""
        return min(
            self.vllm_config.scheduler_config.max_num_batched_tokens,
            self.vllm_config.model_config.max_model_len,
        )
