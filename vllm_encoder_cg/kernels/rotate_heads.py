# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of q and k as they lie in the packed projection, in one launch.

Does what ``kernels.reference.rotate_heads`` does.  Rows behind the last sequence
become 0 in q, k and v: attention reads whole tiles and multiplies what is beyond a
sequence by 0, which leaves a NaN a NaN.  So nothing else of a forward has to keep
those rows finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_LONGEST_RUN = 8
"""Elements of a load of 16 bytes."""


@triton.jit(do_not_specialize=["row_total"])
def _rotate_kernel(
    qkv,
    cos,
    sin,
    out,
    row_total,
    pairs,
    row_stride,
    out_row_stride,
    out_plane_stride,
    COS_ROW_STRIDE: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
):
    HALF: tl.constexpr = SIZE // 2
    PLANE: tl.constexpr = HEADS * SIZE
    # Pairs of all rows in one line, so that no lane is idle: those of q, then of k.
    # A row has as many as it has values.  In runs that no head's end falls into, as
    # the compiler sees from that how wide loads may be.
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    run = pair // RUN
    row = (run // (PLANE // RUN)).to(tl.int64)
    run = run % (PLANE // RUN)
    head = run // (HALF // RUN)
    column = run % (HALF // RUN) * RUN + pair % RUN
    mask = pair < pairs
    dtype = out.dtype.element_ty
    real = mask
    if HAS_TOTAL:
        total = tl.load(row_total)
        real = mask & (row < total)
        value = qkv + row * row_stride + (2 * PLANE + run * RUN + pair % RUN)
        nothing = tl.zeros([BLOCK], qkv.dtype.element_ty)
        tl.store(value, nothing, mask=mask & (row >= total))
    place = row * COS_ROW_STRIDE + column * COS_STRIDE
    c = tl.load(cos + place, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=real, other=0.0).to(tl.float32)
    if INTERLEAVED:
        element = tl.program_id(0) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        run2 = element // (2 * RUN)
        row2 = (run2 // (PLANE // RUN)).to(tl.int64)
        run2 = run2 % (PLANE // RUN)
        mask2 = element < 2 * pairs
        real2 = mask2
        if HAS_TOTAL:
            real2 = mask2 & (row2 < total)
        within = run2 * (2 * RUN) + element % (2 * RUN)
        both = tl.load(qkv + row2 * row_stride + within, mask=real2, other=0.0)
        first, second = tl.split(tl.reshape(both.to(tl.float32), [BLOCK, 2]))
        rotated = tl.join(first * c - second * s, second * c + first * s)
        rotated = tl.reshape(rotated, [2 * BLOCK]).to(dtype)
        is_k = run2 // (PLANE // (2 * RUN))
        target = out + row2 * out_row_stride + is_k * (out_plane_stride - PLANE)
        tl.store(target + within, rotated, mask=mask2)
    else:
        source = qkv + row * row_stride + (head * SIZE + column)
        first = tl.load(source, mask=real, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
        target = out + row * out_row_stride + (head % HEADS * SIZE + column)
        target += head // HEADS * out_plane_stride
        tl.store(target, (first * c - second * s).to(dtype), mask=mask)
        tl.store(target + HALF, (second * c + first * s).to(dtype), mask=mask)


def rotate_heads(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    row_total: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a packed projection, q and k rotated.

    Args:
        qkv: ``[rows, 3 x heads x size]``: all heads of q, then of k, then of v;
            overwritten.  Elements of a row lie together.
        cos: ``[rows, size / 2]``, of any strides and floating-point dtype.
        sin: likewise, with the same strides.
        heads: of this rank.
        row_total: ``[1] int32`` on the device: rows that belong to a sequence; those
            behind them become 0.  None: all rows belong to one.
        interleaved: whether pairs are neighbours (GPT-J), not halves (NeoX).
        in_place: q and k as views of `qkv`; else contiguous.

    Returns:
        three tensors ``[rows, heads, size]``; v is a view of `qkv`.
    """
    rows, width = qkv.shape
    size = width // (3 * heads)
    packed = qkv.unflatten(1, (3, heads, size))
    if in_place:
        out, row_stride, plane_stride = qkv, qkv.stride(0), heads * size
        q, k = packed[:, 0], packed[:, 1]
    else:
        out = torch.empty((2, rows, heads, size), dtype=qkv.dtype, device=qkv.device)
        row_stride, plane_stride = out.stride(1), out.stride(0)
        q, k = out[0], out[1]
    assert cos.stride() == sin.stride()
    pairs, half = rows * heads * size, size // 2
    _rotate_kernel[(triton.cdiv(pairs, _BLOCK),)](
        qkv,
        cos,
        sin,
        out,
        cos if row_total is None else row_total,
        pairs,
        qkv.stride(0),
        row_stride,
        plane_stride,
        # Known when compiled, they say how wide loads may be.
        COS_ROW_STRIDE=cos.stride(0),
        COS_STRIDE=cos.stride(1),
        HEADS=heads,
        SIZE=size,
        RUN=min(_LONGEST_RUN, half & -half),
        BLOCK=_BLOCK,
        INTERLEAVED=interleaved,
        HAS_TOTAL=row_total is not None,
        num_warps=4,
    )
    return q, k, packed[:, 2]
