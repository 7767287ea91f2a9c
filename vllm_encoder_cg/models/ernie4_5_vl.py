# SPDX-License-Identifier: Apache-2.0
"""ERNIE-4.5-VL: packed tower and a resampler that merges pairs of frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_encoder_cg.definitions import EncoderItemSpec, GraphCapacity
from vllm_encoder_cg.models.attention_tables import SequenceTable
from vllm_encoder_cg.models.fused.ernie4_5_vl import FusedErnieVision
from vllm_encoder_cg.models.packed_batch import PackedArguments
from vllm_encoder_cg.models.packed_layout import Grid, PackedLayout
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter

_FRAMES_PER_TOKEN = 2
"""Frames of a video that the resampler merges; fixed in vLLM's code."""


class PairedLayout(PackedLayout):
    """Behind the other sections, per frame: where its tokens begin, and how many
    units further its partner is.

    A unit is a spatially merged block of patches.  An image is its own partner;
    the second frame of a pair has no tokens.
    """

    def __init__(self, table: SequenceTable, merge_size: int) -> None:
        super().__init__(table, merge_size)
        self._starts = self.length
        self._partners = self._starts + table.max_sequences + 1
        self.length = self._partners + table.max_sequences

    def write(self, grids: Sequence[Grid], out: np.ndarray) -> None:
        super().write(grids, out[: self._starts])
        starts, partners = out[self._starts : self._partners], out[self._partners :]
        partners[:] = 0
        tokens = frame = 0
        for t, h, w in grids:
            units = h * w // self.merge_size**2
            partners[frame : frame + t] = 0 if t == 1 else units
            for i in range(t):
                starts[frame + i] = tokens
                if i % _FRAMES_PER_TOKEN == 0:
                    tokens += units
            frame += t
        starts[frame:] = tokens

    def token_starts(self, tables: torch.Tensor) -> torch.Tensor:
        return tables[self._starts : self._partners]

    def mark_sequences(
        self, row_marks: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        marks = super().mark_sequences(row_marks, tables)
        has_partner = tables[self._partners : self.length] > 0
        return marks + torch.where(has_partner, marks.roll(-1), 0.0)

    def pair_units(
        self, tables: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two units that each token is made from; 0 for padded tokens.

        Args:
            index: ``[tokens] int32``: 0, 1, 2, ...

        Returns:
            two tensors ``[tokens] int64``.
        """
        starts = tables[self._starts : self._partners]
        last = self.table.max_sequences - 1
        # A frame without tokens starts where the next one does, so it is skipped.
        frame = torch.searchsorted(starts[1:], index, right=True)
        inside = frame <= last
        frame = frame.clamp(max=last)
        first_row = self.row_starts(tables)[:-1].index_select(0, frame)
        first = first_row // self.merge_size**2 + index
        first = first - starts.index_select(0, frame)
        second = first + tables[self._partners :].index_select(0, frame)
        return (
            torch.where(inside, first, 0).long(),
            torch.where(inside, second, 0).long(),
        )


class Ernie45VLAdapter(PackedTowerAdapter):
    """``vision_model`` takes angles and offsets ready-made; the resampler is run
    step by step, since its own forward indexes frames on the host.

    A video has half as many tokens as units, so the rows of a graph, and not its
    tokens, limit it.
    """

    architectures = ("Ernie4_5_VLMoeForConditionalGeneration",)
    tower_attribute = "vision_model"
    fused_tower = FusedErnieVision

    def unsupported_reason(self) -> str | None:
        reason = super().unsupported_reason()
        if reason is None and not self.model.resampler_model.use_temporal_conv:
            return "its resampler has no temporal step (use_temporal_conv is false)"
        return reason

    @property
    def out_hidden_size(self) -> int:
        return self.model.resampler_model.out_dim

    @property
    def max_side(self) -> int:
        # Angles are computed, not looked up.
        return 2**15

    def temporal_patches(self, frames: int) -> int:
        return -(-frames // _FRAMES_PER_TOKEN) * _FRAMES_PER_TOKEN

    def accepts(self, modality: str, grid: Grid) -> bool:
        frames = grid[0]
        whole = frames == 1 if modality == "image" else frames % _FRAMES_PER_TOKEN == 0
        return whole and super().accepts(modality, grid)

    def item_spec(self, t: int, h: int, w: int) -> EncoderItemSpec:
        spec = super().item_spec(t, h, w)
        if t > 1:
            spec.output_tokens //= _FRAMES_PER_TOKEN
        return spec

    def make_layout(self, capacity: GraphCapacity) -> PackedLayout:
        return PairedLayout(self.make_table(capacity), self.merge_size)

    def tower_forward(self, arguments: PackedArguments) -> torch.Tensor:
        inv_freq = self.tower.rotary_pos_emb.inv_freq
        angles = arguments.rows.places().to(inv_freq.dtype).unsqueeze(2) * inv_freq
        features = self.captured_tower(
            arguments.pixels,
            encoder_metadata={
                "rotary_pos_emb": angles.flatten(1),
                "cu_seqlens": arguments.attention.cu_seqlens,
                "max_seqlen": arguments.attention.max_seqlen,
                "row_total": arguments.row_total,
            },
        )
        layout = arguments.layout
        assert isinstance(layout, PairedLayout)
        units = features.shape[0] // self.merge_size**2
        index = arguments.geometry.row_index[:units]
        return self._resample(features, *layout.pair_units(arguments.tables, index))

    def _resample(
        self, features: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        resampler = self.model.resampler_model
        units = resampler.spatial_conv_reshape(features, resampler.spatial_conv_size)
        units, _ = resampler.spatial_linear1(units)
        units, _ = resampler.spatial_linear2(resampler.spatial_gelu(units))
        units = resampler.spatial_norm(units)
        pairs = torch.cat((units[first], units[second]), dim=-1)
        tokens, _ = resampler.temporal_linear1(pairs)
        tokens, _ = resampler.temporal_linear2(resampler.temporal_gelu(tokens))
        tokens, _ = resampler.mlp(resampler.temporal_norm(tokens))
        return resampler.after_norm(tokens)

    def tower_eager(
        self, modality: str, pixels: torch.Tensor, grids: list[Grid]
    ) -> torch.Tensor:
        table = self.make_grids(grids)
        features = self.model._vision_forward(pixels, table)
        return self.model.resampler_model(features, table)
