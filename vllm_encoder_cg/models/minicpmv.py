# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V: every slice of an image, or frame of a video, is a row of patches.

A slice has about as many patches as the model's base image, in a grid of its own
shape.  After the patch embedding the tower takes patches as a flat sequence, so
one length of rows serves every grid; positions follow from the grids, which the
graph reads from a table.  The resampler turns each slice into as many tokens as
it has queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vllm_encoder_cg.adapter import BufferSpec, EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import DEFAULT_PATH, AxisKeys, EncoderItemSpec
from vllm_encoder_cg.models.finite_pixels import split_finite
from vllm_encoder_cg.models.fused.fusable import FusableAdapter
from vllm_encoder_cg.models.fused.minicpmv import FusedIdefics2Encoder
from vllm_encoder_cg.models.item_counts import unlike_counts
from vllm_encoder_cg.models.padded_samples import sample_grid
from vllm_encoder_cg.models.padded_tower import PaddedTowerAdapter
from vllm_encoder_cg.models.slices import (
    SlicedItems,
    SliceGrid,
    copy_slices,
    read_slices,
)

_CHANNELS = 3
_RESAMPLED_TOGETHER = 16
"""Slices per call of the resampler, whose keys are several times as wide as the
tower's."""
_NO_LAYOUT: AxisKeys = (None,)
"""Axis keys that no graph has."""
_PREFIX = {"image": "", "video": "video_"}


class _Rows(NamedTuple):
    """What the rows of a batch of slices hold, on the device."""

    grids: torch.Tensor
    """``[slices, 2]``: rows and columns of patches."""
    patches: torch.Tensor
    """``[slices]``."""
    real: torch.Tensor
    """``[slices, length]``: whether there is a patch, or padding."""
    places: torch.Tensor
    """``[length]``: 0, 1, 2, ..."""


class MiniCPMVAdapter(FusableAdapter, PaddedTowerAdapter):
    """Graphs exist for slices up to a little above the usual number of patches;
    an item with a longer one, or with a grid beyond the resampler's table of
    positions, is encoded eagerly."""

    architectures = ("MiniCPMV2_5", "MiniCPMV2_6", "MiniCPMV4_0", "MiniCPMV4_5")
    tower_attribute = "vpm"
    fused_tower = FusedIdefics2Encoder
    axis_name = "patches per slice or frame, at most"
    buffer_keys = ("pixels", "grids")

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self._positions: torch.Tensor | None = None

    # -- PaddedTowerAdapter --------------------------------------------------

    @property
    def modalities(self) -> tuple[str, ...]:
        return ("image",) if self.model.version == (2, 5) else ("image", "video")

    @property
    def out_hidden_size(self) -> int:
        return self.model.embed_dim

    def row_lengths(self) -> tuple[int, ...]:
        # Both sides of a grid are rounded to whole patches: a square one has at
        # most `side` patches more than the base image, an oblong one few more.
        side = self.model.config.image_size // self.patch_size
        return (-(-(side * side + side) // 8) * 8,)

    def row_patches(self, length: int) -> int:
        return length

    def row_tokens(self, length: int) -> int:
        return self.model.config.query_num

    @property
    def patch_size(self) -> int:
        """Pixels per side."""
        return self.tower.embeddings.patch_size

    @property
    def positions(self) -> torch.Tensor:
        """``[rows, columns, hidden]``: the resampler's table of positions.

        vLLM replaces the table when it meets a larger grid; graphs go on reading
        the one that they were captured with, which this keeps alive.
        """
        if self._positions is None:
            self._positions = self.model.resampler.pos_embed.to(self.device)
        return self._positions

    # -- EncoderAdapter ------------------------------------------------------

    def backend_name(self) -> str:
        # What masks the padding is PyTorch's own attention, whatever the backend.
        if self.fused:
            return self.captured_tower.attention.attn_backend.name
        return "torch scaled_dot_product_attention"

    def buffer_specs(self, shape: GraphShape) -> dict[str, BufferSpec]:
        rows, length = shape.capacity.extra["rows"], self.length(shape.key)
        patch = self.patch_size
        pixels = (rows, _CHANNELS, patch, patch * length)
        return {
            "pixels": BufferSpec(pixels, self.dtype),
            "grids": BufferSpec((rows * 2,), torch.int32),
        }

    def parse(self, mm_kwargs: dict[str, Any]) -> EncoderBatch | None:
        # Frames of 4.5 that are fused share their tokens; vLLM has no such input
        # so far.
        if any(name.endswith(("_embeds", "temporal_ids")) for name in mm_kwargs):
            return None
        present = [m for m, p in _PREFIX.items() if f"{p}pixel_values" in mm_kwargs]
        if len(present) != 1 or present[0] not in self.modalities:
            return None
        prefix = _PREFIX[present[0]]
        items = read_slices(
            mm_kwargs[f"{prefix}pixel_values"], mm_kwargs.get(f"{prefix}tgt_sizes")
        )
        if items is None or not all(map(self._matches, items.slices, items.grids)):
            return None
        specs = [
            self._item_spec(items.grids[start:stop])
            for start, stop in zip(items.offsets, items.offsets[1:], strict=False)
        ]
        return EncoderBatch(present[0], specs, mm_kwargs, items)

    def _matches(self, pixels: torch.Tensor, grid: SliceGrid) -> bool:
        rows, columns = grid
        patch = self.patch_size
        return (
            rows > 0
            and columns > 0
            and pixels.shape == (_CHANNELS, patch, patch * rows * columns)
            and pixels.dtype == self.dtype
        )

    def _item_spec(self, grids: Sequence[SliceGrid]) -> EncoderItemSpec:
        patches = [rows * columns for rows, columns in grids]
        return EncoderItemSpec(
            input_size=sum(patches),
            output_tokens=len(grids) * self.model.config.query_num,
            demand={"rows": len(grids)},
            axis_keys=self._axis_keys(grids, max(patches)),
        )

    def _axis_keys(self, grids: Sequence[SliceGrid], patches: int) -> AxisKeys:
        fitting = [length for length in self.row_lengths() if length >= patches]
        most_rows, most_columns = self.positions.shape[:2]
        if not fitting or any(
            rows > most_rows or columns > most_columns for rows, columns in grids
        ):
            return _NO_LAYOUT
        return (min(fitting),)

    def fill(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        buffers: dict[str, torch.Tensor],
        shape: GraphShape,
    ) -> None:
        items: SlicedItems = batch.payload
        numbers = items.numbers(indices)
        copy_slices([items.slices[n] for n in numbers], buffers["pixels"])
        table = self.host_tables.take(buffers["grids"].shape[0])
        # One patch in slices that are not used: attention to none is undefined.
        table.array[:] = 1
        table.array.reshape(-1, 2)[: len(numbers)] = [items.grids[n] for n in numbers]
        table.copy_to(buffers["grids"])

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        pixels, grids = buffers["pixels"], buffers["grids"].view(-1, 2)
        if self.fused:
            return self._encode_fused(pixels, grids)
        return self._encode(pixels, grids)

    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = DEFAULT_PATH
    ) -> torch.Tensor:
        items: SlicedItems = batch.payload
        if self.model.use_data_parallel:
            return self._encode_unsharded(items, items.numbers(indices))
        prefix = _PREFIX[batch.modality]
        spans = [slice(*items.offsets[i : i + 2]) for i in indices]
        mm_kwargs = {
            f"{prefix}pixel_values": [items.slices[span] for span in spans],
            f"{prefix}tgt_sizes": [torch.tensor(items.grids[span]) for span in spans],
        }
        return torch.cat(list(self.model.embed_multimodal(**mm_kwargs)))

    def _encode_unsharded(
        self, items: SlicedItems, numbers: Sequence[int]
    ) -> torch.Tensor:
        """The forward for the longest of some slices, without a graph.

        vLLM's own would shard the slices over the ranks once more, and drop the
        mask that keeps padding from real patches.
        """
        slices = [items.slices[n] for n in numbers]
        patch = self.patch_size
        longest = max(pixels.shape[-1] for pixels in slices)
        pixels = slices[0].new_zeros((len(slices), _CHANNELS, patch, longest))
        copy_slices(slices, pixels)
        grids = torch.tensor([items.grids[n] for n in numbers], device=self.device)
        return self._encode(pixels, grids)

    # -- The encoder ---------------------------------------------------------

    def _encode(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """By vLLM's modules: ``[slices, 3, patch, patch * length]`` and ``[slices,
        2]`` on the device to ``[slices * queries, hidden]``."""
        rows = self._rows(pixels, grids)
        hidden = self._embed(pixels, rows)
        mask = (~rows.real).to(hidden.dtype) * torch.finfo(hidden.dtype).min
        hidden = self.tower.encoder(hidden, attention_mask=mask[:, None, None, :])
        return self._resample(self.tower.post_layernorm(hidden), rows)

    def _encode_fused(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """The same in fewer kernels."""
        rows = self._rows(pixels, grids)
        hidden, marks = split_finite(self._embed(pixels, rows))
        hidden = self.captured_tower(hidden, rows.patches)
        tokens = self._resample(hidden, rows)
        spoilt = marks.repeat_interleave(len(tokens) // len(marks))
        return tokens + spoilt.to(tokens.dtype).unsqueeze(1)

    def _rows(self, pixels: torch.Tensor, grids: torch.Tensor) -> _Rows:
        grids = grids.long()
        places = torch.arange(pixels.shape[-1] // self.patch_size, device=pixels.device)
        patches = grids.prod(-1)
        return _Rows(grids, patches, places < patches.unsqueeze(-1), places)

    def _embed(self, pixels: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """``[slices, length, width]``; 0 where there is no patch."""
        # 2.5 takes the patches of a slice as one line, whatever its grid.
        grids = None if self.model.version == (2, 5) else rows.grids
        hidden = self.tower.embeddings(pixels, rows.real.unsqueeze(1), grids)
        # Attention masks padding by adding to scores, which NaN would outlast.
        return torch.where(rows.real.unsqueeze(-1), hidden, 0.0)

    def _resample(self, hidden: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """``[slices, length, width]`` to ``[slices * queries, hidden]``."""
        parts = zip(
            hidden.split(_RESAMPLED_TOGETHER),
            rows.grids.split(_RESAMPLED_TOGETHER),
            rows.real.split(_RESAMPLED_TOGETHER),
            strict=True,
        )
        return torch.cat([self._resample_part(*part, rows.places) for part in parts])

    def _resample_part(
        self,
        hidden: torch.Tensor,
        grids: torch.Tensor,
        real: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """What the resampler does, which itself asks the host for the largest grid
        unless it sees that it is being captured.

        Args:
            hidden: ``[slices, length, width]``.
            grids: ``[slices, 2]``.
            real: ``[slices, length]``: not padding.
            places: ``[length]``: 0, 1, 2, ...

        Returns:
            ``[slices * queries, hidden]``.
        """
        resampler = self.model.resampler
        values, _ = resampler.kv_proj(hidden)
        values = resampler.ln_kv(values)
        columns = grids[:, 1:]
        limits = self.positions.shape
        y = (places // columns).clamp(max=limits[0] - 1)
        x = (places % columns).clamp(max=limits[1] - 1)
        keys = values + self.positions[y, x].to(values.dtype)
        queries = resampler.ln_q(resampler.query)
        attended, _ = resampler.attn(
            queries.unsqueeze(1).expand(-1, len(grids), -1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            key_padding_mask=~real,
            need_weights=False,
        )
        tokens = resampler.ln_post(attended.transpose(0, 1)) @ resampler.proj
        return tokens.flatten(0, 1)

    # -- Random inputs -------------------------------------------------------

    def sample(self, shape: GraphShape, seed: int) -> dict[str, Any]:
        rows, length = shape.capacity.extra["rows"], self.length(shape.key)
        grids = iter([self._sample_grid(length, seed + row) for row in range(rows)])
        counts = unlike_counts(rows, shape.capacity.items)
        items = [[next(grids) for _ in range(count)] for count in counts]
        modality = self.modalities[seed % len(self.modalities)]
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return self.random_kwargs(modality, items, generator)

    def cost_sample(self, shape: GraphShape) -> dict[str, Any]:
        # Slices as most are: vLLM's own forward, which these are timed on too, pads
        # them to the longest of the batch, not to the longest that there may be.
        rows = shape.capacity.extra["rows"]
        side = self.model.config.image_size // self.patch_size
        grid = tuple(min(side, most) for most in self.positions.shape[:2])
        counts = unlike_counts(rows, shape.capacity.items)
        generator = torch.Generator(device=self.device).manual_seed(0)
        items = [[grid] * count for count in counts]
        return self.random_kwargs(self.modalities[0], items, generator)

    def _sample_grid(self, length: int, seed: int) -> SliceGrid:
        rows, columns = sample_grid(length, seed)
        most_rows, most_columns = self.positions.shape[:2]
        return min(rows, most_rows), min(columns, most_columns)

    def random_kwargs(
        self,
        modality: str,
        items: Sequence[Sequence[SliceGrid]],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        """Keyword arguments of ``embed_multimodal`` for items of these slices, of
        the scale that the processor normalises pixels to."""
        patch, prefix = self.patch_size, _PREFIX[modality]

        def pixels(grid: SliceGrid) -> torch.Tensor:
            values = torch.randn(
                (_CHANNELS, patch, patch * grid[0] * grid[1]),
                device=self.device,
                generator=generator,
            )
            return values.to(self.dtype)

        return {
            f"{prefix}pixel_values": [list(map(pixels, grids)) for grids in items],
            f"{prefix}tgt_sizes": [torch.tensor(grids) for grids in items],
        }
