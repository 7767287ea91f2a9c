# SPDX-License-Identifier: Apache-2.0
"""Towers that take the patches of all items as one packed sequence of rows.

Shared here: reading grids, capacities, buffers, sequence tables, selection and
eager calls.  An architecture's adapter adds what its tower wants to know per
row (``tower_forward``) and any further tables.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_encoder_cg.adapter import BufferSpec, EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    BatchLimits,
    EncoderCudaGraphConfig,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.models.attention_tables import (
    AttentionArguments,
    SequenceTable,
    make_sequence_table,
)
from vllm_encoder_cg.models.grid_rows import GridRows, locate_rows
from vllm_encoder_cg.models.host_tables import HostTable, copy_rows, select_rows
from vllm_encoder_cg.models.refusals import (
    pruning_refusal,
    tower_refusal,
    varlen_refusal,
)

Grid = tuple[int, int, int]
"""(frames, height, width) of one item, in patches."""

_MIN_FRAME_TOKENS = 16
"""Frames of fewer tokens are rare; a graph's table of sequences has room for as
many frames as fit its budget at this size, and shorter ones run eagerly once
that is full."""
_SAMPLE_SEQUENCE_TOKENS = 1024


@dataclass(frozen=True)
class PackedItems:
    """What ``parse`` keeps of a batch."""

    pixels: torch.Tensor
    """``[patches, patch elements]``."""
    grids: list[Grid]
    row_offsets: list[int]
    """``[items + 1]``."""


class PackedLayout:
    """Where the sections of the int32 table buffer of one graph lie: the
    sequence table, then the heights and the widths of the sequences."""

    def __init__(self, table: SequenceTable) -> None:
        self.table = table
        self._heights = table.length
        self._widths = self._heights + table.max_sequences
        self.length = self._widths + table.max_sequences

    def write(self, grids: Sequence[Grid], merge_size: int, out: np.ndarray) -> None:
        """Fills the whole table, padding included."""
        if all(t == 1 for t, _, _ in grids):
            heights = [h for _, h, _ in grids]
            widths = [w for _, _, w in grids]
        else:
            heights = [h for t, h, _ in grids for _ in range(t)]
            widths = [w for t, _, w in grids for _ in range(t)]
        count = len(heights)
        out[self._heights :] = merge_size
        out[self._heights : self._heights + count] = heights
        out[self._widths : self._widths + count] = widths
        lengths = (
            out[self._heights : self._heights + count]
            * out[self._widths : self._widths + count]
        )
        self.table.write(lengths, out[: self._heights])

    def sequence_table(self, tables: torch.Tensor) -> torch.Tensor:
        return tables[: self._heights]

    def heights(self, tables: torch.Tensor) -> torch.Tensor:
        return tables[self._heights : self._widths]

    def widths(self, tables: torch.Tensor) -> torch.Tensor:
        return tables[self._widths : self.length]


class PackedTowerAdapter(EncoderAdapter):
    """Base of the packed towers' adapters."""

    pixel_keys: ClassVar[dict[str, str]] = {
        "image": "pixel_values",
        "video": "pixel_values_videos",
    }
    grid_keys: ClassVar[dict[str, str]] = {
        "image": "image_grid_thw",
        "video": "video_grid_thw",
    }
    min_token_budget: ClassVar[int] = 64
    tower_attribute: ClassVar[str] = "visual"

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self.tower = getattr(model, self.tower_attribute, None)
        self._layouts: dict[GraphKey, PackedLayout] = {}
        self._row_index: torch.Tensor | None = None

    # -- What differs between towers ----------------------------------------

    @property
    def merge_size(self) -> int:
        """Patches per side of the block that becomes one output token."""
        return self.tower.spatial_merge_size

    @property
    def out_hidden_size(self) -> int:
        return self.tower.out_hidden_size

    @property
    def backend(self) -> str:
        """``AttentionBackendEnum`` name of the tower's attention."""
        return self.tower.attn_backend.name

    @property
    def row_elements(self) -> int:
        """Elements of one row of q on this rank."""
        return self.tower.hidden_size // self.tower.tp_size

    @property
    def pixel_width(self) -> int:
        """Elements of one input row."""
        weight = self.tower.patch_embed.proj.weight
        return weight[0].numel()

    @property
    def pixel_dtype(self) -> torch.dtype:
        """uint8 where the tower normalises on the device, else its own dtype."""
        input_norm = getattr(self.tower, "input_norm", None)
        return getattr(input_norm, "input_dtype", None) or self.tower.dtype

    @property
    def device(self) -> torch.device:
        return self.tower.device

    @abstractmethod
    def tower_forward(
        self,
        pixels: torch.Tensor,
        rows: GridRows,
        attention: AttentionArguments,
    ) -> torch.Tensor:
        """The tower on prepared metadata: ``[rows / merge^2, out_hidden_size]``."""

    def tower_eager(self, pixels: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        """The tower as vLLM calls it."""
        return self.tower(pixels, [list(grid) for grid in grids])

    # -- EncoderAdapter ------------------------------------------------------

    def unsupported_reason(self) -> str | None:
        return (
            tower_refusal(self.tower, self.vllm_config)
            or pruning_refusal(self.model)
            or varlen_refusal(self.backend, self.device.type)
        )

    def backend_name(self) -> str:
        return self.backend

    def config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=list(self.pixel_keys),
            buffer_keys=["pixels", "tables"],
            out_hidden_size=self.out_hidden_size,
            max_frames_per_video=max(1, self.budget_range()[1] // _MIN_FRAME_TOKENS),
        )

    def budget_range(self) -> tuple[int, int]:
        largest = min(
            self.vllm_config.scheduler_config.max_num_batched_tokens,
            self.vllm_config.model_config.max_model_len,
        )
        return min(self.min_token_budget, largest), largest

    def capacity(self, key: GraphKey, limits: BatchLimits) -> GraphCapacity:
        budget = key.token_budget
        items = min(limits.max_items, budget)
        frames = min(limits.max_frames, -(-budget // _MIN_FRAME_TOKENS))
        return GraphCapacity(
            tokens=budget,
            items=items,
            extra={
                "sequences": max(items, frames),
                "rows": budget * self.merge_size**2,
            },
        )

    def layout(self, shape: GraphShape) -> PackedLayout:
        """The table layout of one graph."""
        layout = self._layouts.get(shape.key)
        if layout is None:
            extra = shape.capacity.extra
            layout = PackedLayout(
                make_sequence_table(
                    self.backend, extra["sequences"], extra["rows"], self.row_elements
                )
            )
            self._layouts[shape.key] = layout
        return layout

    def buffer_specs(self, shape: GraphShape) -> dict[str, BufferSpec]:
        rows = shape.capacity.extra["rows"]
        return {
            "pixels": BufferSpec((rows, self.pixel_width), self.pixel_dtype),
            "tables": BufferSpec((self.layout(shape).length,), torch.int32),
        }

    def parse(self, mm_kwargs: dict[str, Any]) -> EncoderBatch | None:
        present = [m for m, key in self.grid_keys.items() if key in mm_kwargs]
        if len(present) != 1:
            return None
        modality = present[0]
        pixels = mm_kwargs.get(self.pixel_keys[modality])
        if not isinstance(pixels, torch.Tensor):
            return None
        grids = self.read_grids(mm_kwargs[self.grid_keys[modality]])
        merge = self.merge_size
        specs: list[EncoderItemSpec] = []
        for t, h, w in grids:
            if t < 1 or h < merge or w < merge or h % merge or w % merge:
                return None
            specs.append(self.item_spec(t, h, w))
        offsets = list(accumulate((spec.input_size for spec in specs), initial=0))
        if pixels.shape != (offsets[-1], self.pixel_width):
            return None
        if pixels.dtype != self.pixel_dtype:
            return None
        return EncoderBatch(
            modality, specs, mm_kwargs, PackedItems(pixels, grids, offsets)
        )

    def read_grids(self, value: Any) -> list[Grid]:
        """Grids as Python integers.  vLLM keeps them on the host."""
        rows = value.tolist() if isinstance(value, torch.Tensor) else value
        return [(int(t), int(h), int(w)) for t, h, w in rows]

    def item_spec(self, t: int, h: int, w: int) -> EncoderItemSpec:
        rows = t * h * w
        return EncoderItemSpec(
            input_size=rows,
            output_tokens=rows // self.merge_size**2,
            demand={"sequences": t, "rows": rows},
        )

    def fill(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        buffers: dict[str, torch.Tensor],
        shape: GraphShape,
    ) -> None:
        items: PackedItems = batch.payload
        copy_rows(items.pixels, items.row_offsets, indices, buffers["pixels"])
        tables = HostTable(self.layout(shape).length, self.device)
        self.write_tables([items.grids[i] for i in indices], tables.array, shape)
        tables.copy_to(buffers["tables"])

    def write_tables(
        self, grids: Sequence[Grid], out: np.ndarray, shape: GraphShape
    ) -> None:
        """Writes the whole int32 table of a replay."""
        self.layout(shape).write(grids, self.merge_size, out)

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        layout = self.layout(shape)
        tables = buffers["tables"]
        sequences = layout.sequence_table(tables)
        rows = locate_rows(
            layout.table.row_starts(sequences),
            layout.heights(tables),
            layout.widths(tables),
            self.row_index(shape.capacity.extra["rows"]),
            self.merge_size,
        )
        return self.tower_forward(
            buffers["pixels"], rows, layout.table.arguments(sequences)
        )

    def row_index(self, rows: int) -> torch.Tensor:
        """``[rows] int32``: 0, 1, 2, ...; graphs read slices of one tensor."""
        if self._row_index is None or self._row_index.shape[0] < rows:
            self._row_index = torch.arange(rows, dtype=torch.int32, device=self.device)
        return self._row_index[:rows]

    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = DEFAULT_PATH
    ) -> torch.Tensor:
        items: PackedItems = batch.payload
        pixels = select_rows(items.pixels, items.row_offsets, indices)
        return self.tower_eager(pixels, [items.grids[i] for i in indices])

    def sample(self, shape: GraphShape, seed: int) -> dict[str, Any]:
        grids = sample_grids(shape.capacity, self.merge_size, seed)
        modality = "video" if any(t > 1 for t, _, _ in grids) else "image"
        generator = torch.Generator(device=self.device).manual_seed(seed)
        rows = sum(t * h * w for t, h, w in grids)
        size = (rows, self.pixel_width)
        if self.pixel_dtype == torch.uint8:
            pixels = torch.randint(
                0,
                256,
                size,
                dtype=torch.uint8,
                device=self.device,
                generator=generator,
            )
        else:
            pixels = torch.randn(size, device=self.device, generator=generator).to(
                self.pixel_dtype
            )
        return {
            self.pixel_keys[modality]: pixels,
            self.grid_keys[modality]: torch.tensor(grids),
        }


def sample_grids(capacity: GraphCapacity, merge_size: int, seed: int) -> list[Grid]:
    """Grids of several unlike items that fill most of a capacity.

    Odd seeds give videos, where more than one frame fits.
    """
    tokens_left = capacity.tokens
    items_left = capacity.items
    sequences_left = capacity.extra["sequences"]
    grids: list[Grid] = []
    share, aspect = 0.45, 0.6 + 0.1 * (seed % 5)
    while tokens_left > 0 and items_left > 0 and sequences_left > 0:
        last = items_left == 1 or len(grids) >= 3
        tokens = tokens_left if last else max(1, int(tokens_left * share))
        tokens = min(tokens, _SAMPLE_SEQUENCE_TOKENS)
        frames = 1
        if seed % 2 and tokens >= 2 * _MIN_FRAME_TOKENS and sequences_left >= 2:
            frames, tokens = 2, tokens // 2
        height = max(1, int((tokens * aspect) ** 0.5))
        width = max(1, tokens // height)
        grids.append((frames, height * merge_size, width * merge_size))
        tokens_left -= frames * height * width
        sequences_left -= frames
        items_left -= 1
        if len(grids) >= 4 and tokens_left < capacity.tokens // 16:
            break
    return grids
