# SPDX-License-Identifier: Apache-2.0
"""An activation, times the second half of its input where it is gated, in one launch.

Does what ``kernels.reference.activate`` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_encoder_cg.kernels.reference import ACTIVATIONS

_BLOCK = 1024


@triton.jit
def _activate_kernel(
    x,
    out,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    source = x + row * x_stride + columns
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == 1:
        # 0.5 (1 + tanh(u)) is sigmoid(2 u).
        cubic = value + 0.044715 * value * value * value
        value = value * tl.sigmoid(1.5957691216057308 * cubic)
    elif KIND == 2:
        value = value * tl.sigmoid(1.702 * value)
    else:
        value = value * tl.sigmoid(value)
    if GATED:
        value *= tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, value.to(out.dtype.element_ty), mask=mask)


def activate(x: torch.Tensor, activation: str, *, gated: bool = False) -> torch.Tensor:
    """The activation of `x`.

    Args:
        x: ``[rows, width]``, or ``[rows, 2 x width]`` if gated; elements of a row
            lie together.
        activation: one of ``reference.ACTIVATIONS``.
        gated: whether the first half is activated and multiplied by the second.

    Returns:
        ``[rows, width]`` in the dtype of `x`.
    """
    rows, columns = x.shape
    width = columns // 2 if gated else columns
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _activate_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x,
        out,
        x.stride(0),
        WIDTH=width,
        BLOCK=_BLOCK,
        KIND=ACTIVATIONS.index(activation),
        GATED=gated,
        num_warps=4,
    )
    return out
