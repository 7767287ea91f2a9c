# SPDX-License-Identifier: Apache-2.0
"""What follows from the grids of a replay, computed on the device when asked for.

On an NVIDIA GPU a table is one kernel launch; elsewhere, and for what has no
kernel, plain tensor operations do the same (``grid_rows.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_encoder_cg import kernels
from vllm_encoder_cg.models import grid_rows, windows
from vllm_encoder_cg.models.grid_rows import GridRows


@dataclass(frozen=True)
class PackedGeometry:
    """The sequences of one replay."""

    row_starts: torch.Tensor
    """``[sequences + 1] int32``: first row of each, then the row total."""
    heights: torch.Tensor
    """``[sequences] int32``, in patches."""
    widths: torch.Tensor
    """``[sequences] int32``, in patches."""
    row_index: torch.Tensor
    """``[rows] int32``: 0, 1, 2, ..."""
    merge_size: int
    """Patches per side of the blocks in which rows are ordered."""

    @cached_property
    def rows(self) -> GridRows:
        """The place of every row."""
        if kernels.is_available(self.row_starts.device):
            from vllm_encoder_cg.kernels.locate_rows import locate_rows

            return GridRows(
                *locate_rows(
                    self.row_starts,
                    self.heights,
                    self.widths,
                    self.row_index.shape[0],
                    self.merge_size,
                )
            )
        return grid_rows.locate_rows(
            self.row_starts, self.heights, self.widths, self.row_index, self.merge_size
        )

    def window_order(self, side: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each merged unit goes in window order, and which unit comes there.

        Args:
            side: units per side of a window.

        Returns:
            two permutations ``[rows / merge_size^2] int64``.
        """
        units = self.row_index.shape[0] // self.merge_size**2
        if kernels.is_available(self.row_starts.device):
            from vllm_encoder_cg.kernels.window_order import window_order

            return window_order(
                self.row_starts,
                self.heights,
                self.widths,
                units,
                self.merge_size,
                side,
            )
        places = windows.window_places(self.rows, self.merge_size, side)
        return places, windows.invert_permutation(places, self.row_index[:units])

    def rotary_tables(
        self, cos_sin_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[rows, 2 d]`` of every row's place.

        Args:
            cos_sin_cache: ``[positions, 2 d]``: cos, then sin, of a coordinate.
        """
        if kernels.is_available(cos_sin_cache.device):
            from vllm_encoder_cg.kernels.rotary_tables import rotary_tables

            return rotary_tables(
                cos_sin_cache,
                self.row_starts,
                self.heights,
                self.widths,
                self.row_index.shape[0],
                self.merge_size,
            )
        cos, sin = cos_sin_cache.chunk(2, dim=-1)
        return grid_rows.rotary_2d(cos, sin, self.rows.places())

    def bilinear_positions(self, table: torch.Tensor, side: int) -> torch.Tensor:
        """Embeddings ``[rows, hidden]`` interpolated from a square table.

        Args:
            table: ``[side x side, hidden]``.
            side: positions per side.
        """
        if kernels.is_available(table.device):
            from vllm_encoder_cg.kernels.bilinear_positions import bilinear_positions

            return bilinear_positions(
                table,
                side,
                self.row_starts,
                self.heights,
                self.widths,
                self.row_index.shape[0],
                self.merge_size,
            )
        return grid_rows.bilinear_positions(table, side, self.rows)

    def bicubic_positions(
        self, table: torch.Tensor, height: int, width: int, *, normalised: bool
    ) -> torch.Tensor:
        """Embeddings ``[rows, hidden]`` interpolated from a table, bicubically.

        Args:
            table: ``[height x width, hidden]``.
            normalised: whether the eager forward computes coordinates by way of
                [-1, 1], as ``grid_sample`` takes them.
        """
        if kernels.is_available(table.device):
            from vllm_encoder_cg.kernels.bicubic_positions import bicubic_positions

            return bicubic_positions(
                table,
                height,
                width,
                self.row_starts,
                self.heights,
                self.widths,
                self.row_index.shape[0],
                self.merge_size,
                normalised,
            )
        positions = grid_rows.bicubic_positions(table, height, width, self.rows)
        return positions.to(table.dtype)
