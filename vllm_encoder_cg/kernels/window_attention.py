# SPDX-License-Identifier: Apache-2.0
"""Attention inside short sequences, rotary embedding included, in one launch.

Does what ``kernels.reference.rotated_attention`` does.  A sequence is one tile: its
rows are read from the packed projection, rotated in registers and attended at once,
where a kernel for sequences of any length needs a schedule, and rows rotated before.
Products take the projection's dtype and add up in float32, as FlashAttention does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_encoder_cg.kernels.reference import MAX_WINDOW_ROWS


@triton.jit(do_not_specialize=["starts"])
def _window_attention_kernel(
    qkv,
    cos,
    sin,
    starts,
    out,
    row_stride,
    scale,
    COS_ROW_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = SIZE // 2
    begin = tl.load(starts + tl.program_id(0))
    end = tl.load(starts + tl.program_id(0) + 1)
    if begin >= end:
        return
    head = tl.program_id(1)
    row = begin + tl.arange(0, BLOCK_ROWS)
    half = tl.arange(0, BLOCK_HALF)
    mask = (row < end)[:, None] & (half < HALF)[None, :]
    dtype = out.dtype.element_ty
    table = row[:, None] * COS_ROW_STRIDE + half[None, :]
    c = tl.load(cos + table, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=mask, other=0.0).to(tl.float32)
    long_row = row[:, None].to(tl.int64)
    q = qkv + long_row * row_stride + head * SIZE + half[None, :]
    k = q + HEADS * SIZE
    v = k + HEADS * SIZE
    # In halves: a head as a whole fills a power of two less well.
    q1 = tl.load(q, mask=mask, other=0.0).to(tl.float32)
    q2 = tl.load(q + HALF, mask=mask, other=0.0).to(tl.float32)
    k1 = tl.load(k, mask=mask, other=0.0).to(tl.float32)
    k2 = tl.load(k + HALF, mask=mask, other=0.0).to(tl.float32)
    v1 = tl.load(v, mask=mask, other=0.0)
    v2 = tl.load(v + HALF, mask=mask, other=0.0)
    first = (k1 * c - k2 * s).to(dtype)
    second = (k2 * c + k1 * s).to(dtype)
    scores = tl.dot((q1 * c - q2 * s).to(dtype), tl.trans(first))
    scores += tl.dot((q2 * c + q1 * s).to(dtype), tl.trans(second))
    scores = tl.where((row < end)[None, :], scores * scale, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    total = tl.sum(weights, axis=1)[:, None]
    weights = weights.to(dtype)
    target = out + long_row * (HEADS * SIZE) + head * SIZE + half[None, :]
    tl.store(target, (tl.dot(weights, v1) / total).to(dtype), mask=mask)
    tl.store(target + HALF, (tl.dot(weights, v2) / total).to(dtype), mask=mask)


def window_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of the rows of each sequence to each other.

    Args:
        qkv: ``[rows, 3 x heads x size]``: all heads of q, then of k, then of v, before
            rotation; bfloat16 or float16; elements of a row lie together.
        cos: ``[rows, size / 2]``, the halves of a head being the pairs; elements of a
            row lie together.
        sin: likewise, with the same strides.
        heads: of this rank.
        starts: ``[sequences + 1] int32`` on the device, monotonic, at most
            ``MAX_WINDOW_ROWS`` apart.
        scale: of the scores.

    Returns:
        ``[rows, heads x size]``; rows that belong to no sequence are left as the
        memory was.
    """
    rows, width = qkv.shape
    size = width // (3 * heads)
    assert cos.stride() == sin.stride() and cos.stride(1) == 1
    out = torch.empty((rows, heads * size), dtype=qkv.dtype, device=qkv.device)
    _window_attention_kernel[(len(starts) - 1, heads)](
        qkv,
        cos,
        sin,
        starts,
        out,
        qkv.stride(0),
        scale,
        # Known when compiled, it says how wide loads may be.
        COS_ROW_STRIDE=cos.stride(0),
        HEADS=heads,
        SIZE=size,
        BLOCK_ROWS=MAX_WINDOW_ROWS,
        BLOCK_HALF=max(16, triton.next_power_of_2(size // 2)),
        num_warps=4,
    )
    return out
