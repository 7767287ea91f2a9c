# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V's slices as vLLM hands them over: read and copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from vllm_encoder_cg.models.item_counts import row_numbers

SliceGrid = tuple[int, int]
"""(rows, columns) of a slice's patches."""


@dataclass(frozen=True)
class SlicedItems:
    """What ``parse`` keeps of a batch."""

    slices: list[torch.Tensor]
    """``[3, patch, patch * patches]``, item after item."""
    grids: list[SliceGrid]
    """Of each slice."""
    offsets: list[int]
    """``[items + 1]``: item i has the slices ``offsets[i] : offsets[i + 1]``."""

    def numbers(self, indices: Sequence[int]) -> list[int]:
        """Numbers of the slices of the items at `indices`."""
        return row_numbers(self.offsets, indices)


def read_slices(pixels: Any, grids: Any) -> SlicedItems | None:
    """The slices of a batch; None: not such.

    Args:
        pixels: per item, its slices, as vLLM keeps them.
        grids: per item, ``[slices, 2]``: (rows, columns) of patches, on the host.
    """
    if not isinstance(pixels, (list, tuple)) or grids is None:
        return None
    if len(pixels) != len(grids) or not len(pixels):
        return None
    slices: list[torch.Tensor] = []
    sizes: list[SliceGrid] = []
    counts: list[int] = []
    for of_item, grids_of_item in zip(pixels, grids, strict=True):
        if not isinstance(of_item, (list, tuple)) or not of_item:
            return None
        if not all(isinstance(each, torch.Tensor) for each in of_item):
            return None
        if getattr(grids_of_item, "shape", None) != (len(of_item), 2):
            return None
        slices += of_item
        sizes += [(height, width) for height, width in grids_of_item.tolist()]
        counts.append(len(of_item))
    return SlicedItems(slices, sizes, [0, *accumulate(counts)])


def copy_slices(slices: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copies slices into the rows of `buffer`, each from its first column on.

    Args:
        slices: ``[3, patch, patch * patches]`` each.
        buffer: ``[rows, 3, patch, columns]``.

    Raises:
        ValueError: they are more, or longer, than the buffer holds.
    """
    longest = max((pixels.shape[-1] for pixels in slices), default=0)
    if len(slices) > len(buffer) or longest > buffer.shape[-1]:
        raise ValueError(
            f"{len(slices)} slices of up to {longest} columns do not fit a captured "
            f"buffer of {len(buffer)} with {buffer.shape[-1]}"
        )
    for row, pixels in zip(buffer, slices, strict=False):
        row[..., : pixels.shape[-1]].copy_(pixels, non_blocking=True)
