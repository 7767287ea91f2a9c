# SPDX-License-Identifier: Apache-2.0
"""Sequence tables for variable-length attention, per backend.

A packed tower's attention takes the rows of all sequences (an image, or one
frame of a video, is one sequence) and a table of where each begins.  The layout
of that table, and of its padding, differs by backend and is fixed here alone.
Tables are built on the host as int32 and copied to the device in one piece.

Element offsets of the cuDNN layout follow what vLLM's wrapper passes on: q, k
and the output are contiguous rows of ``heads x head_size`` elements, v is a
slice of the packed projection and so has rows three times as long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_CUDNN_BATCH_BUCKETS = (8, 16, 32, 64)
_CUDNN_SEQLEN_BUCKETS = tuple(1024 << i for i in range(8))
_SDPA_TAIL_PIECES = 64


@dataclass(frozen=True)
class AttentionArguments:
    """What vLLM's ``MMEncoderAttention`` is called with."""

    cu_seqlens: torch.Tensor
    max_seqlen: torch.Tensor
    """int32 scalar on the CPU: read on the host, baked at capture."""
    sequence_lengths: torch.Tensor | None = None


class SequenceTable(ABC):
    """A table for at most `max_sequences` sequences over `rows` rows."""

    def __init__(
        self, max_sequences: int, rows: int, max_sequence_rows: int | None = None
    ) -> None:
        self.max_sequences = max_sequences
        self.rows = rows
        self.max_sequence_rows = min(max_sequence_rows or rows, rows)

    @property
    @abstractmethod
    def length(self) -> int:
        """int32 elements of the table."""

    @abstractmethod
    def write(self, lengths: Sequence[int] | np.ndarray, out: np.ndarray) -> None:
        """Writes the whole table for sequences of `lengths` rows, the first at
        row 0, each behind the one before; padding included.

        Args:
            out: ``[length] int32``.
        """

    @abstractmethod
    def arguments(self, table: torch.Tensor) -> AttentionArguments:
        """Views of the device copy of a table, as attention takes them."""

    def row_starts(self, table: torch.Tensor) -> torch.Tensor:
        """``[max_sequences + 1]`` int32 row offsets, monotonic."""
        return table[: self.max_sequences + 1]

    def _max_seqlen(self) -> torch.Tensor:
        return torch.tensor(self.max_sequence_rows, dtype=torch.int32)


def _write_offsets(
    lengths: Sequence[int] | np.ndarray, out: np.ndarray, scale: int = 1
) -> int:
    """Offsets from 0, the last repeated to the end; returns the row total."""
    count = len(lengths)
    out[0] = 0
    np.cumsum(lengths, out=out[1 : count + 1])
    total = int(out[count])
    out[count + 1 :] = total
    if scale != 1:
        out *= scale
    return total


class FlashTable(SequenceTable):
    """``cu_seqlens [max_sequences + 1]``; unused sequences are empty ones at the
    end.  Rows behind the last sequence belong to none."""

    @property
    def length(self) -> int:
        return self.max_sequences + 1

    def write(self, lengths: Sequence[int] | np.ndarray, out: np.ndarray) -> None:
        _write_offsets(lengths, out)

    def arguments(self, table: torch.Tensor) -> AttentionArguments:
        return AttentionArguments(table, self._max_seqlen())


class SdpaTable(SequenceTable):
    """``cu_seqlens`` that covers every row, since SDPA splits by it on the host.

    The rows behind the last real sequence form short sequences of their own, so
    that padding costs linearly.
    """

    @property
    def _tail_rows(self) -> int:
        return max(16, -(-self.rows // _SDPA_TAIL_PIECES))

    @property
    def length(self) -> int:
        return self.max_sequences + 1 + _SDPA_TAIL_PIECES

    def write(self, lengths: Sequence[int] | np.ndarray, out: np.ndarray) -> None:
        starts = out[: self.max_sequences + 1]
        total = _write_offsets(lengths, starts)
        steps = np.arange(1, _SDPA_TAIL_PIECES + 1, dtype=np.int64)
        out[self.max_sequences + 1 :] = np.minimum(
            total + steps * self._tail_rows, self.rows
        )

    def arguments(self, table: torch.Tensor) -> AttentionArguments:
        return AttentionArguments(table, self._max_seqlen())


class CudnnTable(SequenceTable):
    """FlashInfer's cuDNN layout: row offsets (for our own tables), then element
    offsets of q, k and output, then those of v, then the sequence lengths.

    The batch is rounded up to the sizes that vLLM uses, so that cuDNN plans are
    shared with eager calls.

    Args:
        row_elements: ``heads x head_size`` of this rank.
    """

    def __init__(
        self,
        max_sequences: int,
        rows: int,
        row_elements: int,
        max_sequence_rows: int | None = None,
    ) -> None:
        super().__init__(max_sequences, rows, max_sequence_rows)
        if rows * row_elements * 3 >= 2**31:
            raise ValueError(
                f"{rows} rows of {row_elements} elements overflow the int32 offsets "
                "of the FLASHINFER encoder attention; use a smaller largest entry "
                "in encoder_cudagraph_token_budgets, or "
                "--mm-encoder-attn-backend FLASH_ATTN"
            )
        self.row_elements = row_elements
        self.batch = next(
            (b for b in _CUDNN_BATCH_BUCKETS if b >= max_sequences),
            -(-max_sequences // _CUDNN_BATCH_BUCKETS[0]) * _CUDNN_BATCH_BUCKETS[0],
        )

    def _sections(self) -> tuple[slice, slice, slice]:
        first = self.max_sequences + 1
        per = self.batch + 1
        return (
            slice(first, first + 2 * per),
            slice(first + per, first + 2 * per),
            slice(first + 2 * per, first + 2 * per + self.batch),
        )

    @property
    def length(self) -> int:
        return self._sections()[2].stop

    def write(self, lengths: Sequence[int] | np.ndarray, out: np.ndarray) -> None:
        _write_offsets(lengths, out[: self.max_sequences + 1])
        both, v_part, seq = self._sections()
        _write_offsets(lengths, out[both.start : v_part.start], self.row_elements)
        _write_offsets(lengths, out[v_part], 3 * self.row_elements)
        out[seq] = 0
        out[seq.start : seq.start + len(lengths)] = lengths

    def arguments(self, table: torch.Tensor) -> AttentionArguments:
        both, _, seq = self._sections()
        return AttentionArguments(table[both], self._max_seqlen(), table[seq])

    def _max_seqlen(self) -> torch.Tensor:
        bound = self.max_sequence_rows
        largest = _CUDNN_SEQLEN_BUCKETS[-1]
        rounded = next(
            (s for s in _CUDNN_SEQLEN_BUCKETS if s >= bound),
            -(-bound // largest) * largest,
        )
        return torch.tensor(rounded, dtype=torch.int32)


VARLEN_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
"""Backends whose variable-length attention can be captured, on NVIDIA GPUs."""
_FLASH_LAYOUT = ("FLASH_ATTN", "TRITON_ATTN", "ROCM_AITER_FA")


@dataclass(frozen=True)
class LaunchBounds:
    """How generous a graph's table may be.

    FlashAttention 3 schedules only work that exists, so room for more sequences
    costs nothing.  The other kernels launch blocks for every sequence of the table
    at the greatest length, most of which find nothing to do.
    """

    sequence_tokens: int
    """A table has room for one sequence per so many tokens of the budget."""
    min_sequences: int
    """and for at least so many."""
    max_sequence_rows: int | None
    """Longest sequence of a graph; None: all its rows."""

    @property
    def room_is_free(self) -> bool:
        """Whether unused sequences cost no time."""
        return self.max_sequence_rows is None


_FREE = LaunchBounds(16, 64, None)
_LAUNCH_BOUNDS = {
    "FLASHINFER": LaunchBounds(32, 8, 16384),
    "TRITON_ATTN": LaunchBounds(256, 4, 16384),
}


def launch_bounds(backend: str) -> LaunchBounds:
    """The bounds that suit `backend`."""
    return _LAUNCH_BOUNDS.get(backend, _FREE)


def can_capture(backend: str) -> bool:
    """Whether a GPU can capture variable-length attention on `backend`."""
    return backend in (*VARLEN_BACKENDS, *_FLASH_LAYOUT)


def make_sequence_table(
    backend: str,
    max_sequences: int,
    rows: int,
    row_elements: int,
    max_sequence_rows: int | None = None,
) -> SequenceTable:
    """The table for an ``AttentionBackendEnum`` name.

    Args:
        max_sequence_rows: upper bound of one sequence's rows; None: all rows.

    Raises:
        ValueError: the backend has no table here.
    """
    if backend == "FLASHINFER":
        return CudnnTable(max_sequences, rows, row_elements, max_sequence_rows)
    if backend == "TORCH_SDPA":
        return SdpaTable(max_sequences, rows, max_sequence_rows)
    if backend in _FLASH_LAYOUT:
        return FlashTable(max_sequences, rows, max_sequence_rows)
    raise ValueError(
        f"no sequence table for the encoder attention backend {backend}; use "
        f"--mm-encoder-attn-backend with one of {', '.join(VARLEN_BACKENDS)}"
    )
