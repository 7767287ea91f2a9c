# SPDX-License-Identifier: Apache-2.0
"""Residual addition and the norm behind it in one launch, writing both.

Does what ``kernels.reference.add_norm`` does.  The norm sees the sum before it is
rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_norm_kernel(
    x,
    delta,
    scale,
    weight,
    bias,
    total,
    normed,
    x_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    dtype = normed.dtype.element_ty
    # First, so that they are there when the row's sums are.
    if HAS_WEIGHT:
        factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALE:
        share = tl.load(scale + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + row * delta_stride + columns, mask=mask, other=0.0)
        added = added.to(tl.float32)
        if HAS_SCALE:
            added *= share
        value += added
        tl.store(total + row * WIDTH + columns, value.to(dtype), mask=mask)
    if CENTRED:
        mean = tl.sum(value, axis=0) / WIDTH
        value = tl.where(mask, value - mean, 0.0)
    variance = tl.sum(value * value, axis=0) / WIDTH
    value = value * (1.0 / tl.sqrt(variance + eps))
    if HAS_WEIGHT:
        value *= factor
    if HAS_BIAS:
        value += shift
    tl.store(normed + row * WIDTH + columns, value.to(dtype), mask=mask)


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    centred: bool,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + delta * scale`` and its layer norm or RMS norm.

    Args:
        x: ``[rows, width]``; copied where the elements of a row do not lie together.
        delta: as `x`; None: nothing is added.
        weight: ``[width]``, or None.
        bias: likewise.
        centred: whether the mean is taken off (layer norm).
        scale: ``[width]``, or None for 1.

    Returns:
        the sum (where nothing is added, `x` or its copy) and the norm, both
        ``[rows, width]`` in the dtype of `x`; what is new is contiguous.
    """
    rows, width = x.shape
    x = _with_rows_together(x)
    delta = None if delta is None else _with_rows_together(delta)
    normed = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(normed)
    block = triton.next_power_of_2(width)
    # Arguments that are not there are never read.
    _add_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        x if scale is None else scale,
        x if weight is None else weight,
        x if bias is None else bias,
        total,
        normed,
        x.stride(0),
        x.stride(0) if delta is None else delta.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        HAS_SCALE=delta is not None and scale is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        CENTRED=centred,
        num_warps=4 if block <= 2048 else 8,
    )
    return total, normed


def _with_rows_together(x: torch.Tensor) -> torch.Tensor:
    """The patch embedding of a convolution, say, has columns lie together."""
    return x if x.stride(-1) == 1 else x.contiguous()
