# SPDX-License-Identifier: Apache-2.0
"""What the adapters of all families of towers have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm_encoder_cg.adapter import EncoderAdapter
from vllm_encoder_cg.models.quantized_linears import rounds_input
from vllm_encoder_cg.models.refusals import tower_refusal

_QUANTIZED_COARSENESS = 2.0
"""A last bit of float8_e4m3 is 16 times one of bfloat16; but only where a value lies
near the middle of two does a small difference move it."""


class TowerAdapter(EncoderAdapter):
    """Base of the adapters in this folder, of whichever family."""

    tower_attribute: ClassVar[str]
    """The model's attribute that is its vision tower."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self.tower: Any = getattr(model, self.tower_attribute, None)

    def coarseness(self) -> float:
        return _QUANTIZED_COARSENESS if rounds_input(self.tower) else 1.0

    def unsupported_reason(self) -> str | None:
        return tower_refusal(self.tower, self.vllm_config)

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
