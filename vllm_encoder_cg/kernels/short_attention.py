# SPDX-License-Identifier: Apache-2.0
"""Attention inside sequences of a few hundred rows, rotary embedding included, in one
launch.

Does what ``kernels.reference.rotated_attention`` does.  It has no schedule and no
pass over q and k before it, which take as long as attention itself where there is
little of that.  Long sequences are FlashAttention's: here every block of queries
rotates all keys anew.

Products take the projection's dtype and add up in float32, as FlashAttention does.
Rows that belong to no sequence are neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_encoder_cg.kernels.grid_search import find_sequence, search_steps

_BOUNDS_BLOCK = 128
_BLOCK_KEYS = 64
_FEW_ROWS = 512
"""Up to here, smaller blocks of queries occupy more of the GPU."""


@triton.jit(do_not_specialize=["starts", "sequences", "steps", "rows"])
def _bounds_kernel(starts, bounds, sequences, steps, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    inside = row < tl.load(starts + sequences)
    found = find_sequence(starts, sequences, row, steps)
    begin = tl.where(inside, tl.load(starts + found), 0)
    end = tl.where(inside, tl.load(starts + found + 1), 0)
    tl.store(bounds + row, begin, mask=mask)
    tl.store(bounds + rows + row, end, mask=mask)


def sequence_bounds(starts: torch.Tensor, rows: int) -> torch.Tensor:
    """Where the sequence of each row begins and ends.

    Args:
        starts: ``[sequences + 1] int32`` on the device, monotonic, from 0.
        rows: of the result.

    Returns:
        ``[2, rows] int32``; (0, 0) for rows behind the last sequence.
    """
    sequences = len(starts) - 1
    bounds = torch.empty((2, rows), dtype=torch.int32, device=starts.device)
    _bounds_kernel[(triton.cdiv(rows, _BOUNDS_BLOCK),)](
        starts, bounds, sequences, search_steps(sequences), rows, BLOCK=_BOUNDS_BLOCK
    )
    return bounds


@triton.jit(do_not_specialize=["rows"])
def _short_attention_kernel(
    qkv,
    cos,
    sin,
    bounds,
    out,
    rows,
    row_stride,
    scale,
    COS_ROW_STRIDE: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = SIZE // 2
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1)
    begin = tl.load(bounds + row, mask=row < rows, other=0)
    end = tl.load(bounds + rows + row, mask=row < rows, other=0)
    real = begin < end
    last = tl.max(end, axis=0)
    first = tl.min(tl.where(real, begin, last), axis=0)
    if first >= last:
        return

    dtype = out.dtype.element_ty
    half = tl.arange(0, BLOCK_HALF)
    # A head in two parts, the pairs of the rotation: as a whole it fills a power of
    # two no better.
    mask = real[:, None] & (half < HALF)[None, :]
    place = row[:, None] * COS_ROW_STRIDE + half[None, :] * COS_STRIDE
    c = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)
    q = qkv + row[:, None].to(tl.int64) * row_stride + head * SIZE + half[None, :]
    q1 = tl.load(q, mask=mask, other=0.0).to(tl.float32)
    q2 = tl.load(q + HALF, mask=mask, other=0.0).to(tl.float32)
    queries1 = (q1 * c - q2 * s).to(dtype)
    queries2 = (q2 * c + q1 * s).to(dtype)

    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    sum1 = tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32)
    sum2 = tl.zeros([BLOCK_ROWS, BLOCK_HALF], tl.float32)
    for key_start in range(first, last, BLOCK_KEYS):
        key = key_start + tl.arange(0, BLOCK_KEYS)
        key_mask = (key < last)[:, None] & (half < HALF)[None, :]
        turn = key[:, None] * COS_ROW_STRIDE + half[None, :] * COS_STRIDE
        key_c = tl.load(cos + turn, mask=key_mask, other=0.0).to(tl.float32)
        key_s = tl.load(sin + turn, mask=key_mask, other=0.0).to(tl.float32)
        k = qkv + key[:, None].to(tl.int64) * row_stride + half[None, :]
        k += (HEADS + head) * SIZE
        k1 = tl.load(k, mask=key_mask, other=0.0).to(tl.float32)
        k2 = tl.load(k + HALF, mask=key_mask, other=0.0).to(tl.float32)
        v = k + HEADS * SIZE
        v1 = tl.load(v, mask=key_mask, other=0.0)
        v2 = tl.load(v + HALF, mask=key_mask, other=0.0)
        keys1 = (k1 * key_c - k2 * key_s).to(dtype)
        keys2 = (k2 * key_c + k1 * key_s).to(dtype)
        scores = tl.dot(queries1, tl.trans(keys1))
        scores += tl.dot(queries2, tl.trans(keys2))
        own = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        scores = tl.where(own, scores * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        # A row that none of these keys belongs to has nothing to compare yet.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(highest - reference)
        total = total * shrink + tl.sum(weights, axis=1)
        weights = weights.to(dtype)
        sum1 = sum1 * shrink[:, None] + tl.dot(weights, v1)
        sum2 = sum2 * shrink[:, None] + tl.dot(weights, v2)
        highest = higher
    target = out + row[:, None].to(tl.int64) * (HEADS * SIZE) + head * SIZE
    target += half[None, :]
    total = tl.where(real, total, 1.0)[:, None]
    tl.store(target, (sum1 / total).to(dtype), mask=mask)
    tl.store(target + HALF, (sum2 / total).to(dtype), mask=mask)


def short_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    bounds: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of the rows of each sequence to each other.

    Args:
        qkv: ``[rows, 3 x heads x size]``: all heads of q, then of k, then of v, before
            rotation; bfloat16 or float16; elements of a row lie together.
        cos: ``[rows, size / 2]``, of any strides and floating-point dtype; the halves
            of a head are the pairs.
        sin: likewise, with the same strides.
        heads: of this rank.
        bounds: of ``sequence_bounds``.
        scale: of the scores.

    Returns:
        ``[rows, heads x size]``; rows that belong to no sequence are left as the
        memory was.
    """
    rows, width = qkv.shape
    size = width // (3 * heads)
    assert cos.stride() == sin.stride()
    block_rows = 32 if rows <= _FEW_ROWS else 64
    out = torch.empty((rows, heads * size), dtype=qkv.dtype, device=qkv.device)
    _short_attention_kernel[(triton.cdiv(rows, block_rows), heads)](
        qkv,
        cos,
        sin,
        bounds,
        out,
        rows,
        qkv.stride(0),
        scale * 1.4426950408889634,  # exp2 takes the place of exp
        # Known when compiled, they say how wide loads may be.
        COS_ROW_STRIDE=cos.stride(0),
        COS_STRIDE=cos.stride(1),
        HEADS=heads,
        SIZE=size,
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=_BLOCK_KEYS,
        BLOCK_HALF=max(16, triton.next_power_of_2(size // 2)),
        num_warps=4,
        num_stages=2,
    )
    return out
