# SPDX-License-Identifier: Apache-2.0
"""Towers that take images as square tiles of one fixed size.

A tile gives a constant number of output rows and never looks at another tile,
so a graph is fixed by its number of tiles, unused ones are harmless whatever they
hold, and there are no tables.  Shared here: capacities in whole tiles, buffers,
filling, eager calls and sample input.  An architecture's adapter says what its
tiles are, where a batch keeps them and how its tower is called.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, repeat
from typing import Any, ClassVar

import torch

from vllm_encoder_cg.adapter import BufferSpec, EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    BatchLimits,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.models.finite_pixels import split_finite
from vllm_encoder_cg.models.host_tables import copy_rows, select_rows
from vllm_encoder_cg.models.tower import TowerAdapter

Grid = tuple[int, int]
"""(columns, rows) of tiles that an image is cut into; (1, 1): not cut."""

_CHANNELS = 3
_KNOWN_ITEMS = 4096
"""Items whose specs are kept."""


@dataclass(frozen=True)
class TileKind:
    """The tiles of one path."""

    buffer: str
    """Name of the captured tensor ``[tiles, 3, side, side]``."""
    side: int
    """Pixels."""
    patches: int
    """Rows that the tower reads for a tile."""
    tokens: int
    """Rows that the tower returns for a tile."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of all items of a batch on one path."""

    pixels: torch.Tensor
    """``[tiles, 3, side, side]``, item after item."""
    counts: list[int]
    """Tiles per item."""
    offsets: list[int] = field(init=False)
    """``[items + 1]``: item i has the tiles ``offsets[i] : offsets[i + 1]``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", [0, *accumulate(self.counts)])

    def match(self, kind: TileKind) -> bool:
        """Whether pixels and counts agree with each other and with `kind`."""
        shape = self.pixels.shape
        if min(self.counts, default=0) < 0 or not shape:
            return False
        total = self.offsets[-1]
        if total != shape[0] or not self.pixels.is_floating_point():
            return False
        # Without any tile, the rest of the shape is the processor's whim.
        return not total or shape[1:] == (_CHANNELS, kind.side, kind.side)


@dataclass(frozen=True)
class TiledItems:
    """What ``parse`` keeps of a batch."""

    tiles: Mapping[str, Tiles]
    """Per path."""
    grids: Sequence[Grid | None] = ()
    """Per item, where its rows depend on how it was cut; None: it was not."""


class TiledTowerAdapter(TowerAdapter):
    """Base of the tiled towers' adapters."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    tower_attribute = "vision_model"
    optional_paths: ClassVar[frozenset[str]] = frozenset()
    """Paths on which an item may have no tile."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self._kinds: dict[str, TileKind] | None = None
        self._item_spec = lru_cache(_KNOWN_ITEMS)(self._make_spec)

    # -- What differs between towers ----------------------------------------

    @abstractmethod
    def tile_kinds(self) -> dict[str, TileKind]:
        """Per path; constant for a model."""

    @property
    @abstractmethod
    def out_hidden_size(self) -> int:
        """Width of an output row."""

    @abstractmethod
    def read_items(self, mm_kwargs: dict[str, Any]) -> tuple[str, TiledItems] | None:
        """Modality and tiles of a batch; None: not pixels, or not readable."""

    @abstractmethod
    def encode(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        """Tower and projector on ``[tiles, 3, side, side]``: ``[rows, hidden]``.

        Captured, so it must not read the device from the host; where encoders
        are data parallel, it must not communicate.
        """

    def captured_encode(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        """What graphs run for ``encode``, of the same result."""
        return self.encode(pixels, path)

    @abstractmethod
    def random_images(
        self, grids: Sequence[Grid], generator: torch.Generator
    ) -> dict[str, Any]:
        """Keyword arguments of ``embed_multimodal`` for images cut like this."""

    def random_videos(
        self, frames: Sequence[int], generator: torch.Generator
    ) -> dict[str, Any]:
        """Likewise for videos of so many frames."""
        raise NotImplementedError(f"{type(self.model).__name__} takes no videos")

    @abstractmethod
    def sample_images(
        self, shape: GraphShape, generator: torch.Generator
    ) -> dict[str, Any]:
        """Images that fill a graph, or as much of it as its item limit lets."""

    def joining_rows(self, grid: Grid | None) -> int:
        """Rows of an item that ``assemble`` adds to those of the tower."""
        return 0

    # -- EncoderAdapter ------------------------------------------------------

    def backend_name(self) -> str:
        for module in self.tower.modules() if self.tower is not None else ():
            backend = getattr(module, "attn_backend", None)
            if backend is not None:
                return backend.name
        return "unknown"

    @property
    def kinds(self) -> dict[str, TileKind]:
        """``tile_kinds()``, computed once."""
        if self._kinds is None:
            self._kinds = self.tile_kinds()
        return self._kinds

    def config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=list(self.modalities),
            buffer_keys=[kind.buffer for kind in self.kinds.values()],
            out_hidden_size=self.out_hidden_size,
            paths={
                path: EncoderCudaGraphPathConfig(
                    min_token_budget=self._min_budget(kind),
                    allow_zero_tokens=path in self.optional_paths,
                    token_granularity=kind.tokens,
                )
                for path, kind in self.kinds.items()
            },
        )

    def _min_budget(self, kind: TileKind) -> int:
        return min(kind.tokens, self.budget_range()[1])

    def budget_range(self) -> tuple[int, int]:
        first = next(iter(self.kinds.values()))
        return min(first.tokens, self.most_tokens), self.most_tokens

    def capacity(self, key: GraphKey, limits: BatchLimits) -> GraphCapacity:
        # Rounded up, so that a budget between two numbers of tiles is kept.  The
        # tokens count the tiles, so these need no limit of their own; the number
        # of items says nothing about either.
        kind = self.kinds[key.path]
        tiles = -(-key.token_budget // kind.tokens)
        return GraphCapacity(tokens=tiles * kind.tokens, items=limits.max_items)

    def tile_capacity(self, shape: GraphShape) -> int:
        """Tiles that a graph holds."""
        return shape.capacity.tokens // self.kinds[shape.key.path].tokens

    def buffer_specs(self, shape: GraphShape) -> dict[str, BufferSpec]:
        kind = self.kinds[shape.key.path]
        size = (self.tile_capacity(shape), _CHANNELS, kind.side, kind.side)
        return {kind.buffer: BufferSpec(size, self.dtype)}

    def parse(self, mm_kwargs: dict[str, Any]) -> EncoderBatch | None:
        if any(name.endswith("_embeds") for name in mm_kwargs):
            return None
        found = self.read_items(mm_kwargs)
        if found is None:
            return None
        modality, items = found
        counts = []
        for path, kind in self.kinds.items():
            tiles = items.tiles[path]
            if not tiles.match(kind):
                return None
            counts.append(tiles.counts)
        grids = items.grids or repeat(None)
        specs = list(map(self._item_spec, zip(*counts, strict=True), grids))
        return EncoderBatch(modality, specs, mm_kwargs, items)

    def _make_spec(self, counts: Sequence[int], grid: Grid | None) -> EncoderItemSpec:
        patches = 0
        tokens = {}
        for (path, kind), count in zip(self.kinds.items(), counts, strict=True):
            patches += count * kind.patches
            tokens[path] = count * kind.tokens
        return EncoderItemSpec(
            input_size=patches,
            output_tokens=sum(tokens.values()) + self.joining_rows(grid),
            path_output_tokens={} if DEFAULT_PATH in tokens else tokens,
        )

    def fill(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        buffers: dict[str, torch.Tensor],
        shape: GraphShape,
    ) -> None:
        tiles: Tiles = batch.payload.tiles[shape.key.path]
        buffer = buffers[self.kinds[shape.key.path].buffer]
        copy_rows(tiles.pixels, tiles.offsets, indices, buffer, cleared=0)

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        path = shape.key.path
        pixels, marks = split_finite(buffers[self.kinds[path].buffer])
        rows = self.captured_encode(pixels, path).unflatten(0, (len(marks), -1))
        return (rows + marks.to(rows.dtype)[:, None, None]).flatten(0, 1)

    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = DEFAULT_PATH
    ) -> torch.Tensor:
        tiles: Tiles = batch.payload.tiles[path]
        pixels = select_rows(tiles.pixels, tiles.offsets, indices).to(self.dtype)
        if not pixels.shape[0]:
            return pixels.new_empty((0, self.out_hidden_size))
        return self.encode(pixels, path)

    def assemble(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        outputs: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        if not outputs:  # items without tiles
            empty = (0, self.out_hidden_size)
            return [torch.empty(empty, dtype=self.dtype, device=self.device)] * len(
                indices
            )
        return super().assemble(batch, indices, outputs)

    def warm_up_key(self, shape: GraphShape) -> Hashable | None:
        if self.backend_name() == "FLASHINFER":
            return None  # cuDNN builds a plan for every shape
        # Triton compiles a kernel anew by whether 16 divides a size, and for 1.
        tiles = self.tile_capacity(shape)
        return math.gcd(tiles, 16), tiles == 1

    def sample(self, shape: GraphShape, seed: int) -> dict[str, Any]:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return self.sample_images(shape, generator)

    def random_pixels(
        self, kind: TileKind, tiles: int, generator: torch.Generator
    ) -> torch.Tensor:
        """Standard normal, the scale that processors normalise pixels to."""
        return torch.randn(
            (tiles, _CHANNELS, kind.side, kind.side),
            dtype=self.dtype,
            device=self.device,
            generator=generator,
        )


def count_crops(grid: Grid) -> int:
    """Tiles of an image beside the one that shows all of it."""
    columns, rows = grid
    return columns * rows if columns * rows > 1 else 0
