# SPDX-License-Identifier: Apache-2.0
"""How far an encoder's own eager output moves when its input hardly does.

A graph pads, so that a matrix product may run another kernel than in eager and
round otherwise.  Deep towers amplify that, some more than others: what eager makes
of an image differs as much when the image gets company, or when some of its pixels
change in their last bit.  No graph can be closer to eager than eager is to itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_EVERY = 16
"""Enough for all roundings behind to differ, and little of a change by itself."""

_FACTOR = 1.25
_MOST = 2.0


def relative_norm(result: torch.Tensor, reference: torch.Tensor) -> float:
    """``|result - reference| / |reference|``, in float32.

    inf where shapes differ or a value of `result` is not finite.  Reads the
    device.
    """
    if result.shape != reference.shape:
        return float("inf")
    reference = reference.float()
    error = (result.float() - reference).norm() / reference.norm().clamp(min=1e-30)
    value = float(error)
    return value if value == value else float("inf")


def nudge(mm_kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same batch with every 16th value of its pixels moved by its last bit.

    Args:
        mm_kwargs: of ``embed_multimodal``; tensors, or lists of them.
        dtype: the encoder's; a last bit is one of this dtype.
    """
    return {name: _nudge(value, dtype) for name, value in mm_kwargs.items()}


def _nudge(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_nudge(each, dtype) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        moved = value * (1 + torch.finfo(dtype).eps)
    elif value.dtype == torch.uint8 and torch.finfo(dtype).bits == 16:
        # One of 255 steps is about a last bit of bfloat16; of float32 it is far more.
        moved = value ^ 1
    else:
        return value
    result = value.clone(memory_format=torch.contiguous_format)
    result.view(-1)[::_EVERY] = moved.reshape(-1)[::_EVERY]
    return result


def allowed_error(
    tolerance: float,
    moved: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """The largest relative norm of a difference that rounding explains.

    Args:
        tolerance: for encoders of common steadiness.
        moved: eager embeddings of a nudged batch.
        references: eager embeddings of the batch.

    Returns:
        1.25 times what eager differs from itself; at least `tolerance`, and no more
        than twice as much.
    """
    spread = max(map(relative_norm, moved, references))
    if not math.isfinite(spread):
        return tolerance
    return min(max(tolerance, _FACTOR * spread), _MOST * tolerance)
