# SPDX-License-Identifier: Apache-2.0
"""Further managers for a model that is built already, some with seeded faults."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.attention_tables import AttentionArguments, SdpaTable
from vllm_encoder_cg.models.packed_layout import Grid, PackedLayout
from vllm_encoder_cg.models.qwen3_vl import Qwen3VLAdapter


def make_variant(
    manager: EncoderCudaGraphManager,
    patch: pytest.MonkeyPatch,
    *,
    adapter: type[EncoderAdapter] | None = None,
    budgets: Sequence[int] = (64, 256),
    **settings: Any,
) -> EncoderCudaGraphManager:
    """Another manager, not yet captured, for the model of `manager`.

    Args:
        adapter: drives the model instead of its own adapter.
        settings: entries of ``additional_config["encoder_cg"]``.
    """
    config = copy.copy(manager.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.encoder_cudagraph_token_budgets = list(budgets)
    config.additional_config = {"encoder_cg": settings}
    if adapter is not None:
        patch.setattr(
            "vllm_encoder_cg.manager.adapt",
            lambda model, vllm_config: (adapter(model, vllm_config), None),
        )
    return EncoderCudaGraphManager(config, manager.device, manager.dtype, manager.model)


class AttendsAcrossImages(Qwen3VLAdapter):
    """``cu_seqlens`` of one sequence: every image sees all others."""

    def make_layout(self, capacity: Any) -> PackedLayout:
        layout = super().make_layout(capacity)
        layout.table.__class__ = _OneSequence
        return layout


class _OneSequence(SdpaTable):
    def arguments(self, table: torch.Tensor) -> AttentionArguments:
        ends = torch.tensor([0, self.rows], dtype=torch.int32)
        return AttentionArguments(ends, self._max_seqlen())


class KeepsStaleGrids(Qwen3VLAdapter):
    """Heights and widths stay those of the first batch that a graph saw."""

    def make_layout(self, capacity: Any) -> PackedLayout:
        layout = super().make_layout(capacity)
        layout.__class__ = _StaleLayout
        return layout


class _StaleLayout(PackedLayout):
    first: np.ndarray | None = None

    def write(self, grids: Sequence[Grid], out: np.ndarray) -> None:
        super().write(grids, out)
        if self.first is None:
            self.first = out.copy()
        out[self._heights :] = self.first[self._heights :]


class SwapsItems(Qwen3VLAdapter):
    """Writes the items in the opposite order."""

    def fill(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        buffers: dict[str, torch.Tensor],
        shape: GraphShape,
    ) -> None:
        super().fill(batch, list(reversed(indices)), buffers, shape)


class ReadsPadding(Qwen3VLAdapter):
    """Adds to every output what the buffers hold behind the items."""

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        return super().forward(buffers, shape) + buffers["pixels"][-1].float().mean()
