# SPDX-License-Identifier: Apache-2.0
"""Towers that take the patches of all items as one packed sequence of rows.

Shared here: reading grids, capacities, buffers, sequence tables, selection and
eager calls.  An architecture's adapter adds what its tower wants to know per
row (``tower_forward``) and any further tables.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import torch

from vllm_encoder_cg.adapter import BufferSpec, EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    BatchLimits,
    EncoderCudaGraphConfig,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.models.attention_tables import (
    SequenceTable,
    launch_bounds,
    make_sequence_table,
)
from vllm_encoder_cg.models.finite_pixels import split_finite
from vllm_encoder_cg.models.fused.fusable import FusableAdapter
from vllm_encoder_cg.models.host_tables import (
    DeviceTables,
    HostTable,
    HostTables,
    copy_rows,
    select_rows,
)
from vllm_encoder_cg.models.packed_batch import PackedArguments, PackedItems
from vllm_encoder_cg.models.packed_geometry import PackedGeometry
from vllm_encoder_cg.models.packed_layout import Grid, PackedLayout
from vllm_encoder_cg.models.packed_samples import (
    random_rows,
    sample_grids,
    uniform_grids,
)
from vllm_encoder_cg.models.refusals import pruning_refusal, varlen_refusal

_KNOWN_GRIDS = 4096
"""Grids whose specs are kept."""
_KNOWN_TABLE_GRIDS = 4
"""Tables of so few items are kept: those of larger batches hardly come again."""
_MIN_FRAME_TOKENS = 16
"""Frames of fewer tokens are rare: the most frames of a video are those that fit
the largest budget at this size."""


class PackedTowerAdapter(FusableAdapter):
    """Base of the packed towers' adapters."""

    pixel_keys: ClassVar[dict[str, str]] = {
        "image": "pixel_values",
        "video": "pixel_values_videos",
    }
    grid_keys: ClassVar[dict[str, str]] = {
        "image": "image_grid_thw",
        "video": "video_grid_thw",
    }
    tower_attribute = "visual"
    passes_sequence_lengths: ClassVar[bool] = False
    """Whether the tower hands sequence lengths to attention, which FLASHINFER
    needs."""
    min_token_budget: ClassVar[int] = 64

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self._layouts: dict[GraphKey, PackedLayout] = {}
        self._host_tables = HostTables()
        self._device_tables = DeviceTables()
        self._known_spec = lru_cache(_KNOWN_GRIDS)(self._make_spec)
        self._row_index: torch.Tensor | None = None

    # -- What differs between towers ----------------------------------------

    @abstractmethod
    def tower_forward(self, arguments: PackedArguments) -> torch.Tensor:
        """The tower and what follows it, on tables instead of grids:
        ``[tokens, out_hidden_size]``."""

    def tower_eager(
        self, modality: str, pixels: torch.Tensor, grids: list[Grid]
    ) -> torch.Tensor:
        """The same as vLLM's ``embed_multimodal`` computes it."""
        return self.tower(pixels, [list(grid) for grid in grids])

    @property
    def attention_layer(self) -> Any:
        """An ``MMEncoderAttention`` of the tower; all are alike."""
        return self.tower.blocks[0].attn.attn

    @property
    def merge_size(self) -> int:
        """Patches per side of the block that becomes one output token."""
        return self.tower.spatial_merge_size

    @property
    def row_merge_size(self) -> int:
        """Patches per side of the blocks in which rows are ordered; 1: row by
        row of the image."""
        return self.merge_size

    @property
    def out_hidden_size(self) -> int:
        return self.tower.out_hidden_size

    @property
    def pixel_width(self) -> int:
        """Elements of one input row."""
        return self.tower.patch_embed.proj.weight[0].numel()

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one input row."""
        return (self.pixel_width,)

    @property
    def pixel_dtype(self) -> torch.dtype:
        """uint8 where the tower normalises on the device, else its own dtype."""
        input_norm = getattr(self.tower, "input_norm", None)
        return getattr(input_norm, "input_dtype", None) or self.tower.dtype

    @property
    def max_side(self) -> int:
        """Largest height or width of a frame that the tower has positions for."""
        return self.tower.rotary_pos_emb.cos_sin_cache.shape[0]

    def read_grids(self, value: Any) -> list[Grid]:
        """Grids as Python integers.  vLLM keeps them on the host."""
        if isinstance(value, torch.Tensor):
            return list(map(tuple, value.tolist()))
        return [(int(t), int(h), int(w)) for t, h, w in value]

    def make_grids(self, grids: Sequence[Grid]) -> torch.Tensor:
        """The reverse: grids as vLLM's processor gives them."""
        return torch.tensor(grids)

    def accepts(self, modality: str, grid: Grid) -> bool:
        """Whether an item of this grid can be encoded at all."""
        t, h, w = grid
        merge, limit = self.merge_size, self.max_side
        return (
            t >= 1
            and merge <= h <= limit
            and merge <= w <= limit
            and h % merge == 0
            and w % merge == 0
        )

    def item_spec(self, t: int, h: int, w: int) -> EncoderItemSpec:
        rows = t * h * w
        return EncoderItemSpec(
            input_size=rows,
            output_tokens=rows // self.merge_size**2,
            demand=self.demand(t, h, w),
        )

    def demand(self, t: int, h: int, w: int) -> dict[str, int]:
        """What an item takes of a graph's capacity, beside its tokens."""
        demand = {"sequences": t, "rows": t * h * w}
        longest = launch_bounds(self.backend).max_sequence_rows
        if longest is not None and h * w > longest:
            demand["long_sequences"] = t
        return demand

    def temporal_patches(self, frames: int) -> int:
        """Frames of the grid of a video of so many frames."""
        config = self.vllm_config.model_config.hf_config.vision_config
        return -(-frames // config.temporal_patch_size)

    def make_layout(self, capacity: GraphCapacity) -> PackedLayout:
        return PackedLayout(self.make_table(capacity), self.merge_size)

    # -- Tools for subclasses ------------------------------------------------

    @property
    def backend(self) -> str:
        """``AttentionBackendEnum`` name of the tower's attention."""
        return self.attention_layer.attn_backend.name

    @cached_property
    def _row_type(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of an input row: every batch is compared with them, and
        reading them off the modules each time takes longer than the comparison."""
        return self.row_shape, self.pixel_dtype

    def make_table(
        self,
        capacity: GraphCapacity,
        sequences: str = "sequences",
        max_sequence_rows: int | None = None,
    ) -> SequenceTable:
        """A sequence table for all rows of a graph.

        Args:
            sequences: the name of their number in the capacity.
            max_sequence_rows: upper bound of one sequence's rows.
        """
        layer = self.attention_layer
        return make_sequence_table(
            self.backend,
            capacity.extra[sequences],
            capacity.extra["rows"],
            layer.num_heads * layer.head_size,
            max_sequence_rows or launch_bounds(self.backend).max_sequence_rows,
        )

    def row_index(self, rows: int) -> torch.Tensor:
        """``[rows] int32``: 0, 1, 2, ...; graphs read slices of one tensor."""
        if self._row_index is None or self._row_index.shape[0] < rows:
            self._row_index = torch.arange(rows, dtype=torch.int32, device=self.device)
        return self._row_index[:rows]

    # -- EncoderAdapter ------------------------------------------------------

    def unsupported_reason(self) -> str | None:
        return (
            super().unsupported_reason()
            or pruning_refusal(self.model)
            or varlen_refusal(
                self.backend, self.device.type, self.passes_sequence_lengths
            )
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
        return min(self.min_token_budget, self.most_tokens), self.most_tokens

    def capacity(self, key: GraphKey, limits: BatchLimits) -> GraphCapacity:
        budget = key.token_budget
        rows = budget * self.merge_size**2
        bounds = launch_bounds(self.backend)
        room = max(bounds.min_sequences, -(-budget // bounds.sequence_tokens))
        sequences = min(budget, room, max(limits.max_items, limits.max_frames))
        extra = {"sequences": sequences, "rows": rows}
        if bounds.max_sequence_rows is not None:
            # Whatever is longer takes one of none.
            extra["long_sequences"] = 0
        return GraphCapacity(budget, min(limits.max_items, sequences), extra)

    def layout(self, shape: GraphShape) -> PackedLayout:
        """The table layout of one graph."""
        layout = self._layouts.get(shape.key)
        if layout is None:
            layout = self.make_layout(shape.capacity)
            self._layouts[shape.key] = layout
        return layout

    def buffer_specs(self, shape: GraphShape) -> dict[str, BufferSpec]:
        rows = shape.capacity.extra["rows"]
        return {
            "pixels": BufferSpec((rows, *self.row_shape), self.pixel_dtype),
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
        given = mm_kwargs[self.grid_keys[modality]]
        if isinstance(given, torch.Tensor) and given.is_floating_point():
            return None
        try:
            grids = self.read_grids(given)
        except (TypeError, ValueError):  # not rows of so many integers
            return None
        specs = []
        for grid in grids:
            spec = self._known_spec(modality, grid)
            if spec is None:
                return None
            specs.append(spec)
        offsets = list(accumulate((spec.input_size for spec in specs), initial=0))
        row_shape, dtype = self._row_type
        if pixels.shape != (offsets[-1], *row_shape):
            return None
        if pixels.dtype != dtype and not (
            pixels.dtype.is_floating_point and dtype.is_floating_point
        ):
            return None
        return EncoderBatch(
            modality, specs, mm_kwargs, PackedItems(pixels, grids, offsets)
        )

    def _make_spec(self, modality: str, grid: Grid) -> EncoderItemSpec | None:
        return self.item_spec(*grid) if self.accepts(modality, grid) else None

    def fill(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        buffers: dict[str, torch.Tensor],
        shape: GraphShape,
    ) -> None:
        items: PackedItems = batch.payload
        copy_rows(items.pixels, items.row_offsets, indices, buffers["pixels"])
        layout = self.layout(shape)
        grids = tuple([items.grids[i] for i in indices])
        if len(grids) <= _KNOWN_TABLE_GRIDS:
            self._device_tables.fill(
                buffers["tables"], layout, grids, lambda: self._write(layout, grids)
            )
        else:
            self._write(layout, grids).copy_to(buffers["tables"])

    def _write(self, layout: PackedLayout, grids: Sequence[Grid]) -> HostTable:
        table = self._host_tables.take(layout.length)
        layout.write(grids, table.array)
        return table

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        layout = self.layout(shape)
        pixels, tables = buffers["pixels"], buffers["tables"]
        marks = None
        if pixels.is_floating_point():
            pixels, marks = split_finite(pixels)
        geometry = PackedGeometry(
            layout.row_starts(tables),
            layout.heights(tables),
            layout.widths(tables),
            self.row_index(pixels.shape[0]),
            self.row_merge_size,
        )
        attention = layout.table.arguments(layout.sequence_table(tables))
        tokens = self.tower_forward(
            PackedArguments(pixels, geometry, attention, layout, tables)
        )
        if marks is None:
            return tokens
        return layout.spoil_tokens(tokens, marks, tables, self.row_index(len(tokens)))

    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = DEFAULT_PATH
    ) -> torch.Tensor:
        items: PackedItems = batch.payload
        pixels = select_rows(items.pixels, items.row_offsets, indices)
        grids = [items.grids[i] for i in indices]
        return self.tower_eager(batch.modality, pixels, grids)

    def warm_up_key(self, shape: GraphShape) -> Hashable | None:
        if self.backend == "FLASHINFER":
            return None  # cuDNN builds a plan for every shape
        # Triton compiles a kernel anew by what divides its sizes and the addresses
        # of the tables, which lie one behind the other.
        sizes = (shape.capacity.tokens, *shape.capacity.extra.values())
        divisors = tuple([(size % 16 == 0, size % 4, size == 1) for size in sizes])
        return divisors, self.kernels_differ_by(shape.capacity.extra["rows"])

    def sample(self, shape: GraphShape, seed: int) -> dict[str, Any]:
        videos = "video" in self.pixel_keys
        grids = sample_grids(shape.capacity, self.merge_size, seed, videos)
        return self._sample_kwargs(grids, seed)

    def cost_sample(self, shape: GraphShape) -> dict[str, Any]:
        return self._sample_kwargs(uniform_grids(shape.capacity, self.merge_size), 0)

    def _sample_kwargs(self, grids: list[Grid], seed: int) -> dict[str, Any]:
        modality = "video" if any(t > 1 for t, _, _ in grids) else "image"
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return self.random_kwargs(modality, grids, generator)

    def random_kwargs(
        self, modality: str, grids: Sequence[Grid], generator: torch.Generator
    ) -> dict[str, Any]:
        """Arguments of ``embed_multimodal`` for random patches of these grids."""
        rows = sum(t * h * w for t, h, w in grids)
        return {
            self.pixel_keys[modality]: random_rows(
                (rows, *self.row_shape), self.pixel_dtype, generator
            ),
            self.grid_keys[modality]: self.make_grids(grids),
        }
