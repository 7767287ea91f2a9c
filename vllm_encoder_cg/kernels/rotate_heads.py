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

from vllm_encoder_cg.kernels.launch import options


@triton.jit
def _rotate_kernel(
    qkv,
    cos,
    sin,
    out,
    row_total,
    row_stride,
    out_row_stride,
    out_plane_stride,
    cos_row_stride,
    cos_column_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    HALF: tl.constexpr = SIZE // 2
    row = tl.program_id(0).to(tl.int64)
    # The heads of q, then those of k.
    head = tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    source = qkv + row * row_stride + head[:, None] * SIZE
    target = out + row * out_row_stride
    target += (head // HEADS * out_plane_stride + head % HEADS * SIZE)[:, None]
    mask = (head < 2 * HEADS)[:, None] & (half < HALF)[None, :]
    both = tl.arange(0, 2 * BLOCK_HALF)
    whole = (head < 2 * HEADS)[:, None] & (both < SIZE)[None, :]
    dtype = out.dtype.element_ty
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if HAS_TOTAL:  # noqa: SIM102 - decided when compiled
        if row >= tl.load(row_total):
            nothing = tl.zeros([BLOCK_HEADS, 2 * BLOCK_HALF], dtype)
            tl.store(target + both[None, :], nothing, mask=whole)
            value = qkv + row * row_stride + ((2 * HEADS + head) * SIZE)[:, None]
            inside = (head < HEADS)[:, None] & (both < SIZE)[None, :]
            tl.store(
                value + both[None, :], nothing.to(qkv.dtype.element_ty), mask=inside
            )
            return
    place = row * cos_row_stride + half * cos_column_stride
    c = tl.load(cos + place, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + place, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    if INTERLEAVED:
        pairs = tl.load(source + both[None, :], mask=whole, other=0.0).to(tl.float32)
        pairs = tl.reshape(pairs, [BLOCK_HEADS, BLOCK_HALF, 2])
        first, second = tl.split(pairs)
        rotated = tl.join(first * c - second * s, second * c + first * s)
        rotated = tl.reshape(rotated, [BLOCK_HEADS, 2 * BLOCK_HALF])
        tl.store(target + both[None, :], rotated.to(dtype), mask=whole)
    else:
        source += half[None, :]
        target += half[None, :]
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
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
    _rotate_kernel[(rows,)](
        qkv,
        cos,
        sin,
        out,
        cos if row_total is None else row_total,
        qkv.stride(0),
        row_stride,
        plane_stride,
        cos.stride(0),
        cos.stride(1),
        HEADS=heads,
        SIZE=size,
        BLOCK_HEADS=triton.next_power_of_2(2 * heads),
        BLOCK_HALF=triton.next_power_of_2(size // 2),
        INTERLEAVED=interleaved,
        HAS_TOTAL=row_total is not None,
        num_warps=4,
        **options(qkv.device),
    )
    return q, k, packed[:, 2]
