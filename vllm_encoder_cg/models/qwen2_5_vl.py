# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL: packed tower most of whose blocks attend inside windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_encoder_cg.definitions import BatchLimits, GraphCapacity, GraphKey
from vllm_encoder_cg.models.attention_tables import SequenceTable, launch_bounds
from vllm_encoder_cg.models.fused.qwen2_5_vl import FusedQwen25Vision
from vllm_encoder_cg.models.packed_batch import PackedArguments
from vllm_encoder_cg.models.packed_layout import Grid, PackedLayout
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter
from vllm_encoder_cg.models.windows import (
    count_windows,
    max_windows,
    window_lengths,
)

_WINDOW_TOKENS = 12
"""Where room for windows costs time: tokens of a window of an ordinary image, most
of which are whole (16)."""


class WindowedLayout(PackedLayout):
    """Behind the other sections, a second sequence table: one sequence per
    window."""

    def __init__(
        self, table: SequenceTable, merge_size: int, windows: SequenceTable, side: int
    ) -> None:
        super().__init__(table, merge_size)
        self.windows = windows
        self._side = side
        self._start = self.length
        self.length += windows.length

    def write(self, grids: Sequence[Grid], out: np.ndarray) -> None:
        super().write(grids, out[: self._start])
        merge = self.merge_size
        lengths = []
        for t, h, w in grids:
            lengths += [window_lengths(h // merge, w // merge, self._side)] * t
        self.windows.write(np.concatenate(lengths) * merge**2, out[self._start :])

    def window_table(self, tables: torch.Tensor) -> torch.Tensor:
        """The section that attention inside windows takes."""
        return tables[self._start :]


class Qwen25VLAdapter(PackedTowerAdapter):
    """``visual`` reorders merged units by window and back again; it takes both
    orders, rotary tables in window order and the offsets of frames and windows
    ready-made."""

    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    passes_sequence_lengths = True
    fused_tower = FusedQwen25Vision

    @property
    def window_side(self) -> int:
        """Merged units per side of a window."""
        tower = self.tower
        return tower.window_size // tower.spatial_merge_size // tower.patch_size

    def demand(self, t: int, h: int, w: int) -> dict[str, int]:
        merge = self.merge_size
        windows = t * count_windows(h // merge, w // merge, self.window_side)
        return super().demand(t, h, w) | {"windows": windows}

    def capacity(self, key: GraphKey, limits: BatchLimits) -> GraphCapacity:
        capacity = super().capacity(key, limits)
        units = capacity.extra["rows"] // self.merge_size**2
        sequences = capacity.extra["sequences"]
        windows = max_windows(units, sequences, self.window_side)
        if not launch_bounds(self.backend).room_is_free:
            windows = min(windows, sequences + -(-units // _WINDOW_TOKENS))
        return replace(capacity, extra={**capacity.extra, "windows": windows})

    def make_layout(self, capacity: GraphCapacity) -> PackedLayout:
        side = self.window_side
        rows = (side * self.merge_size) ** 2
        windows = self.make_table(capacity, "windows", max_sequence_rows=rows)
        return WindowedLayout(self.make_table(capacity), self.merge_size, windows, side)

    def tower_forward(self, arguments: PackedArguments) -> torch.Tensor:
        geometry, full = arguments.geometry, arguments.attention
        layout = arguments.layout
        assert isinstance(layout, WindowedLayout)
        local = layout.windows.arguments(layout.window_table(arguments.tables))
        back, order = geometry.window_order(self.window_side)
        tables = geometry.rotary_tables(self.tower.rotary_pos_emb.cos_sin_cache)
        cos, sin = (
            table.unflatten(0, (len(order), -1))[order].flatten(0, 1)
            for table in tables
        )
        return self.captured_tower(
            arguments.pixels,
            None,
            encoder_metadata={
                "rotary_pos_emb_cos": cos,
                "rotary_pos_emb_sin": sin,
                "window_index": order,
                "reverse_indices": back,
                "cu_seqlens": full.cu_seqlens,
                "max_seqlen_full": full.max_seqlen,
                "sequence_lengths_full": full.sequence_lengths,
                "cu_window_seqlens": local.cu_seqlens,
                "max_seqlen_window": local.max_seqlen,
                "sequence_lengths_window": local.sequence_lengths,
                "row_total": arguments.row_total,
            },
        )
