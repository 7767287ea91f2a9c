# SPDX-License-Identifier: Apache-2.0
"""Keeps pixels that are not finite from the neighbours of their image.

Attention kernels read whole tiles of values, also of the next sequence, and
multiply what does not belong to theirs by zero, which leaves a NaN a NaN.  So a
graph computes with 0 in place of what is not finite, and puts NaN into the rows
that come of it, as eager has them: the request is spoilt, and no other.

Captured, so nothing here reads the device from the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_NAN = float("nan")


def split_finite(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pixels, and which of them are not as they should be.

    Args:
        pixels: ``[rows, ...]`` of a floating-point dtype.

    Returns:
        The pixels with 0 where they are not finite, and ``[rows]`` float32: NaN for
        rows that have such a place, else 0.
    """
    sums = pixels.flatten(1).sum(1, dtype=torch.float32)
    return torch.nan_to_num(pixels, nan=0.0, posinf=0.0, neginf=0.0), sums * 0


def spread_over_sequences(
    marks: torch.Tensor, row_starts: torch.Tensor
) -> torch.Tensor:
    """Which sequences have a row that is marked.

    Args:
        marks: ``[rows]``, of ``split_finite``.
        row_starts: ``[sequences + 1] int32``, monotonic, from 0 to at most rows.

    Returns:
        ``[sequences] float32``: NaN or 0.
    """
    before = F.pad(marks.isnan().cumsum(0), (1, 0))
    at_starts = before.index_select(0, row_starts)
    return torch.where(at_starts[1:] > at_starts[:-1], _NAN, 0.0)


def spoil_tokens(
    tokens: torch.Tensor,
    sequence_marks: torch.Tensor,
    token_starts: torch.Tensor,
    index: torch.Tensor,
) -> torch.Tensor:
    """The tokens, NaN where those of a marked sequence are.

    Args:
        tokens: ``[tokens, hidden]``.
        sequence_marks: ``[sequences]``, of ``spread_over_sequences``.
        token_starts: ``[sequences + 1] int32``: first token of each sequence; equal
            to the next one's for a sequence without tokens.
        index: ``[tokens] int32``: 0, 1, 2, ...
    """
    sequence = torch.searchsorted(token_starts[1:], index, right=True)
    sequence = sequence.clamp(max=sequence_marks.shape[0] - 1)
    marks = sequence_marks.index_select(0, sequence).to(tokens.dtype)
    return tokens + marks.unsqueeze(1)
