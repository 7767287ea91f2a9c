# SPDX-License-Identifier: Apache-2.0
"""The int32 table that a packed tower's graph reads: how it is laid out.

One table per replay, written on the host and copied to the device in one
piece.  An architecture with tables of its own appends sections.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_encoder_cg.models.attention_tables import SequenceTable
from vllm_encoder_cg.models.finite_pixels import spoil_tokens, spread_over_sequences

Grid = tuple[int, int, int]
"""(frames, height, width) of one item, in patches."""


class PackedLayout:
    """The sequence table, then the heights and the widths of the sequences.

    Args:
        table: one sequence per image or frame.
        merge_size: patches per side of a merged block; height and width of the
            sequences that are not used.
    """

    def __init__(self, table: SequenceTable, merge_size: int) -> None:
        self.table = table
        self.merge_size = merge_size
        self._heights = table.length
        self._widths = self._heights + table.max_sequences
        self.length = self._widths + table.max_sequences
        """int32 elements of all sections."""

    def write(self, grids: Sequence[Grid], out: np.ndarray) -> None:
        """Writes the whole table, padding included.

        Args:
            grids: of the items, in the order of their rows.
            out: ``[length] int32``.
        """
        if all(t == 1 for t, _, _ in grids):
            heights = [h for _, h, _ in grids]
            widths = [w for _, _, w in grids]
        else:
            heights = [h for t, h, _ in grids for _ in range(t)]
            widths = [w for t, _, w in grids for _ in range(t)]
        count = len(heights)
        end = self._widths + self.table.max_sequences
        out[self._heights : end] = self.merge_size
        out[self._heights : self._heights + count] = heights
        out[self._widths : self._widths + count] = widths
        lengths = (
            out[self._heights : self._heights + count]
            * out[self._widths : self._widths + count]
        )
        self.table.write(lengths, out[: self._heights])

    def sequence_table(self, tables: torch.Tensor) -> torch.Tensor:
        """The section that attention takes."""
        return tables[: self._heights]

    def row_starts(self, tables: torch.Tensor) -> torch.Tensor:
        """``[sequences + 1]``: first row of each sequence, then the row total."""
        return self.table.row_starts(self.sequence_table(tables))

    def token_starts(self, tables: torch.Tensor) -> torch.Tensor:
        """``[sequences + 1]``: first token of each sequence, then the total."""
        return self.row_starts(tables) // self.merge_size**2

    def mark_sequences(
        self, row_marks: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        """``[sequences]``: NaN for those whose tokens depend on a marked row, else 0.

        Args:
            row_marks: ``[rows]``, of ``split_finite``.
        """
        return spread_over_sequences(row_marks, self.row_starts(tables))

    def spoil_tokens(
        self,
        tokens: torch.Tensor,
        row_marks: torch.Tensor,
        tables: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """``[tokens, hidden]``: NaN in the images and frames that have a marked row.

        Args:
            index: ``[tokens] int32``: 0, 1, 2, ...
        """
        marks = self.mark_sequences(row_marks, tables)
        return spoil_tokens(tokens, marks, self.token_starts(tables), index)

    def heights(self, tables: torch.Tensor) -> torch.Tensor:
        """``[sequences]``, in patches."""
        return tables[self._heights : self._widths]

    def widths(self, tables: torch.Tensor) -> torch.Tensor:
        """``[sequences]``, in patches."""
        return tables[self._widths : self._widths + self.table.max_sequences]
