# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's rows of patches as vLLM hands them over: read, selected, copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from vllm_encoder_cg.models.host_tables import copy_rows
from vllm_encoder_cg.models.item_counts import read_counts, row_numbers

Rows: TypeAlias = torch.Tensor | list[torch.Tensor]
"""``[rows, patches, ...]``, or a list of ``[patches, ...]``."""


def write_token_rows(counts: Sequence[int], width: int, out: np.ndarray) -> None:
    """Writes which pooled rows are tokens, in order; the rest of `out` is 0.

    Args:
        counts: real tokens of each image or frame; its pooled rows begin at a
            multiple of `width`, the real ones first.
        out: ``[capacity tokens] int32``.
    """
    each = np.asarray(counts, dtype=np.int64)
    total = int(each.sum())
    before = np.cumsum(each) - each
    shifts = np.arange(len(counts)) * width - before
    out[:total] = np.arange(total) + np.repeat(shifts, each)
    out[total:] = 0


def row_shapes(value: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each row; empty: no tensors."""
    if isinstance(value, torch.Tensor):
        return [(tuple(value.shape[1:]), value.dtype)] * len(value)
    if not isinstance(value, (list, tuple)):
        return []
    if not all(isinstance(row, torch.Tensor) for row in value):
        return []
    return [(tuple(row.shape), row.dtype) for row in value]


def read_frame_tokens(value: Any, frames: Sequence[int]) -> list[int] | None:
    """Tokens of each frame, from what vLLM keeps on the host; None: not there."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or len(value) != len(frames):
        return None
    tokens: list[int] = []
    for of_video, count in zip(value, frames, strict=True):
        per_frame = read_counts(of_video)
        if per_frame is None or len(per_frame) != count:
            return None
        tokens += per_frame
    return tokens


def copy_token_rows(
    source: Rows, offsets: Sequence[int], indices: Sequence[int], buffer: torch.Tensor
) -> int:
    """Copies the rows of the items at `indices`; returns how many.

    Raises:
        ValueError: they are more, or of another shape, than the buffer holds.
    """
    if isinstance(source, torch.Tensor):
        return copy_rows(source, offsets, indices, buffer, cleared=0)
    rows = row_numbers(offsets, indices)
    chosen = [source[row] for row in rows]
    shape = buffer.shape[1:]
    if len(rows) > len(buffer) or any(values.shape != shape for values in chosen):
        raise ValueError(
            f"{len(rows)} rows do not fit a captured buffer of {tuple(buffer.shape)}"
        )
    if all(values.device == buffer.device for values in chosen) and len(chosen) > 1:
        torch.stack(chosen, out=buffer[: len(chosen)])  # one launch
    else:
        for slot, values in enumerate(chosen):
            buffer[slot].copy_(values, non_blocking=True)
    return len(chosen)


def select_token_rows(source: Rows, rows: Sequence[int]) -> Rows:
    """The rows of these numbers; `source` itself where that is all of it."""
    if isinstance(source, list) or rows != list(range(len(source))):
        picked = [source[row] for row in rows]
        uniform = len({row.shape for row in picked}) == 1
        return torch.stack(picked) if uniform else picked
    return source
