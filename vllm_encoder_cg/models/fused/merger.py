# SPDX-License-Identifier: Apache-2.0
"""The step behind the blocks of Qwen's towers: patches of a token side by side, and
an MLP on them."""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg.models.fused.blocks import FusedMlp
from vllm_encoder_cg.models.fused.modules import Activation, Norm


class FusedMerger:
    """Norm and merge, in either order, then an MLP.

    Args:
        norm: over a patch (``project`` follows it), or over a merged token
            (``merge_then_norm``).
        width: of a merged token.
    """

    def __init__(self, norm: Norm, width: int, mlp: FusedMlp) -> None:
        self.norm = norm
        self._width = width
        self._mlp = mlp

    @classmethod
    def of_norm_first(cls, merger: Any) -> FusedMerger:
        """Of a merger of Qwen2-VL or Qwen2.5-VL."""
        first, activation, second = merger.mlp
        mlp = FusedMlp(first, Activation(activation), second)
        return cls(Norm(merger.ln_q), merger.hidden_size, mlp)

    @property
    def is_plain(self) -> bool:
        """Whether its products are on this rank alone."""
        return self._mlp.is_plain

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """``[tokens, out]`` from rows that the norm has seen."""
        return self._mlp(normed.view(-1, self._width))

    def merge_then_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[tokens, out]`` from rows, where the norm is over a merged token."""
        return self.project(self.norm(hidden.view(-1, self._width)))
