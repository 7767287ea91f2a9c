# SPDX-License-Identifier: Apache-2.0
"""What an adapter with a fused tower has in common with others."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from vllm_encoder_cg.kernels.short_rows import size_class
from vllm_encoder_cg.models.fused.modules import FusionRefusedError
from vllm_encoder_cg.models.refusals import fusion_refusal
from vllm_encoder_cg.models.tower import TowerAdapter


class FusableAdapter(TowerAdapter):
    """Base of the adapters that may have a fused tower.

    A subclass calls ``captured_tower`` in its captured forward instead of ``tower``.
    """

    fused_tower: ClassVar[type[Any] | None] = None
    """Makes of the tower one that is called alike; None: there is none."""

    _fused: Any = None

    @property
    def captured_tower(self) -> Any:
        """vLLM's tower, or the fused one where that is to be captured."""
        return self._fused if self.fused else self.tower

    def kernels_differ_by(self, rows: int) -> Hashable:
        """Equal for graphs whose captured forwards run the same kernels."""
        return size_class(rows) if self.fused else None

    def fusion_refusal(self) -> str | None:
        if self.fused_tower is None:
            return super().fusion_refusal()
        reason = fusion_refusal(self.device, self.vllm_config)
        if reason is None and self._fused is None:
            try:
                self._fused = self.fused_tower(self.tower)
            except FusionRefusedError as error:
                reason = str(error)
            except Exception as error:  # a vLLM whose towers are built otherwise
                reason = f"its modules are not as known: {error}"
        return reason
