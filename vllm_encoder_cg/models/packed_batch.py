# SPDX-License-Identifier: Apache-2.0
"""What a packed tower's adapter hands from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_encoder_cg.models.attention_tables import AttentionArguments
from vllm_encoder_cg.models.grid_rows import GridRows
from vllm_encoder_cg.models.packed_geometry import PackedGeometry
from vllm_encoder_cg.models.packed_layout import Grid, PackedLayout


@dataclass(frozen=True)
class PackedItems:
    """What ``parse`` keeps of a batch."""

    pixels: torch.Tensor
    """``[patches, *row_shape]``."""
    grids: list[Grid]
    row_offsets: list[int]
    """``[items + 1]``."""


@dataclass(frozen=True)
class PackedArguments:
    """What a tower's forward is made from, all of it on the device."""

    pixels: torch.Tensor
    """``[rows, *row_shape]``."""
    geometry: PackedGeometry
    attention: AttentionArguments
    layout: PackedLayout
    tables: torch.Tensor
    """``[layout.length] int32``."""

    @property
    def row_total(self) -> torch.Tensor:
        """``[1] int32``: rows of all items; those behind are padding."""
        return self.geometry.row_starts[-1:]

    @property
    def rows(self) -> GridRows:
        """The place of every row."""
        return self.geometry.rows
