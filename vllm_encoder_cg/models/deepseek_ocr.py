# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-OCR: SAM and CLIP over the whole image and over its crops.

Both paths leave a square grid of features per tile.  An item is the crops' grid,
stitched together as the image was cut, then the whole image's; every row of
either grid ends in a learned "newline" row, and a learned "separator" row comes
last.  The whole image's newlines are part of the graph, the rest is one gather
per sub-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm_encoder_cg.adapter import EncoderBatch
from vllm_encoder_cg.models.host_tables import HostTable
from vllm_encoder_cg.models.tiled_tower import (
    Grid,
    TiledItems,
    TileKind,
    Tiles,
    count_crops,
)
from vllm_encoder_cg.models.two_path_tower import GLOBAL, LOCAL, TwoPathAdapter

_PATCH_SIDE = 16
_REDUCTION = 4
"""Patches per side of what becomes one feature."""
_NEWLINE = -1


class DeepseekOCRAdapter(TwoPathAdapter):
    """Rows by the number of crops.

    vLLM's own path drops an image's crops when their pixels happen to sum to
    exactly 0, for which it waits for the device.  The prompt has placeholders
    for them all the same, and an engine does not survive too few embeddings, so
    that is not repeated here.
    """

    architectures = ("DeepseekOCRForCausalLM",)

    def tile_kinds(self) -> dict[str, TileKind]:
        from vllm.transformers_utils.processors.deepseek_ocr import (
            BASE_SIZE,
            IMAGE_SIZE,
        )

        whole, crop = _grid_side(BASE_SIZE), _grid_side(IMAGE_SIZE)
        return {
            GLOBAL: TileKind(
                buffer="pixel_values",
                side=BASE_SIZE,
                patches=(BASE_SIZE // _PATCH_SIDE) ** 2,
                tokens=whole * (whole + 1),
            ),
            LOCAL: TileKind(
                buffer="images_crop",
                side=IMAGE_SIZE,
                patches=(IMAGE_SIZE // _PATCH_SIDE) ** 2,
                tokens=crop**2,
            ),
        }

    @property
    def out_hidden_size(self) -> int:
        return self.model.projector_config.n_embed

    @property
    def crop_grid_side(self) -> int:
        """Features per side of a crop."""
        return _grid_side(self.kinds[LOCAL].side)

    def read_items(self, mm_kwargs: dict[str, Any]) -> tuple[str, TiledItems] | None:
        whole = mm_kwargs.get("pixel_values")
        crops = mm_kwargs.get("images_crop")
        cut = mm_kwargs.get("images_spatial_crop")
        if not isinstance(whole, torch.Tensor) or not isinstance(crops, torch.Tensor):
            return None
        if not isinstance(cut, torch.Tensor) or cut.ndim != 2 or cut.shape[1] != 2:
            return None
        cuts: list[Grid] = [(columns, rows) for columns, rows in cut.tolist()]
        if any(columns < 1 or rows < 1 for columns, rows in cuts):
            return None
        grids: list[Grid | None] = [c if count_crops(c) else None for c in cuts]
        if not any(grids) and crops.shape[0] == len(cuts):
            # Processors leave the only crop of an image out; it is used if given.
            grids = list(cuts)
        counts = [grid[0] * grid[1] if grid else 0 for grid in grids]
        tiles = {GLOBAL: Tiles(whole, [1] * len(cuts)), LOCAL: Tiles(crops, counts)}
        return "image", TiledItems(tiles, grids)

    def joining_rows(self, grid: Grid | None) -> int:
        newlines = grid[1] * self.crop_grid_side if grid else 0
        return newlines + 1

    def encode(self, pixels: torch.Tensor, path: str) -> torch.Tensor:
        sam = self.model.sam_model(pixels)
        clip = self.model.vision_model(pixels, sam)[:, 1:]
        joined = torch.cat((clip, sam.flatten(2).transpose(1, 2)), dim=-1)
        features = self.model.projector(joined)
        if path == GLOBAL:
            side = int(features.shape[1] ** 0.5)
            grid = features.unflatten(1, (side, side))
            newline = self.model.image_newline.expand(*grid.shape[:2], 1, -1)
            features = torch.cat((grid, newline), dim=2).flatten(1, 2)
        return features.flatten(0, 1)

    def assemble(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        outputs: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        items: TiledItems = batch.payload
        for path, output in outputs.items():
            # What is gathered below lies beyond the rows otherwise.
            expected = sum(batch.specs[i].get_path_output_tokens(path) for i in indices)
            if len(output) != expected:
                raise ValueError(f"{len(output)} rows instead of {expected} on {path}")
        constants = torch.stack((self.model.image_newline, self.model.view_seperator))
        rows = torch.cat((*outputs.values(), constants))
        starts = {}
        start = 0
        for path, output in outputs.items():
            starts[path] = start
            start += output.shape[0]
        newline, separator = start, start + 1

        whole, crop = self.kinds[GLOBAL].tokens, self.kinds[LOCAL].tokens
        pieces = []
        for i in indices:
            grid = items.grids[i]
            if grid:
                order = stitched_rows(grid, self.crop_grid_side)
                pieces.append(
                    np.where(order == _NEWLINE, newline, order + starts[LOCAL])
                )
                starts[LOCAL] += grid[0] * grid[1] * crop
            pieces.append(np.arange(starts[GLOBAL], starts[GLOBAL] + whole))
            pieces.append(np.array([separator]))
            starts[GLOBAL] += whole
        tokens = [batch.specs[i].output_tokens for i in indices]
        index = HostTable(sum(tokens))
        np.concatenate(pieces, out=index.array)
        positions = torch.empty(sum(tokens), dtype=torch.int32, device=rows.device)
        index.copy_to(positions)
        return list(rows.index_select(0, positions).split(tokens))

    def random_cut(
        self, grids: Sequence[Grid | None], generator: torch.Generator
    ) -> dict[str, Any]:
        whole, crops = self.random_tiles(grids, generator)
        return {
            "pixel_values": whole,
            "images_crop": crops,
            "images_spatial_crop": torch.tensor([grid or (1, 1) for grid in grids]),
        }


def _grid_side(pixels: int) -> int:
    """Features per side of a tile."""
    return -(-(pixels // _PATCH_SIDE) // _REDUCTION)


@lru_cache(maxsize=256)
def stitched_rows(grid: Grid, side: int) -> np.ndarray:
    """Reading order of the crops of one image.

    Args:
        grid: (columns, rows) of crops, which are stored row after row.
        side: features per side of a crop.

    Returns:
        ``[rows * side * (columns * side + 1)] int32``: positions among the crops'
        features, crop after crop, and -1 for a newline.
    """
    columns, rows = grid
    features = np.arange(rows * columns * side**2, dtype=np.int32)
    by_row = features.reshape(rows, columns, side, side).transpose(0, 2, 1, 3)
    order = np.full((rows * side, columns * side + 1), _NEWLINE, dtype=np.int32)
    order[:, :-1] = by_row.reshape(rows * side, columns * side)
    return order.reshape(-1)
