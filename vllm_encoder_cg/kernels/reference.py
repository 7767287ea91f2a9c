# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a fused forward compute, in plain PyTorch operations.

Tests compare each kernel with its function here, and a fused forward runs these
where there is no GPU.  Arithmetic is in float32, or float64 for such input, with
one rounding to the input's dtype at the end.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu")
MAX_WINDOW_ROWS = 64
"""Of a sequence that ``kernels.window_attention`` takes; here, to be read without
Triton."""


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


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
    """``kernels.add_norm.add_norm``."""
    value = _wide(x)
    if delta is not None:
        value = value + (_wide(delta) if scale is None else _wide(delta) * scale)
    width = (value.shape[-1],)
    if centred:
        normed = F.layer_norm(value, width, eps=eps)
    else:
        normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight
    if bias is not None:
        normed = normed + bias
    return x if delta is None else value.to(x.dtype), normed.to(x.dtype)


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
    """``kernels.rotate_heads.rotate_heads``; `in_place` changes nothing here."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
    if row_total is not None:
        inside = torch.arange(len(qkv), device=qkv.device) < row_total
        q, k, v = (each.masked_fill(~inside[:, None, None], 0.0) for each in (q, k, v))
    return (
        _rotate(q, cos, sin, interleaved),
        _rotate(k, cos, sin, interleaved),
        v,
    )


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    wide = _wide(x)
    cos, sin = cos.to(wide.dtype).unsqueeze(1), sin.to(wide.dtype).unsqueeze(1)
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    halves = (first * cos - second * sin, second * cos + first * sin)
    rotated = (
        torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    )
    return rotated.to(x.dtype)


def rotated_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """``kernels.window_attention.window_attention``, and ``short_attention`` with
    `starts` in place of its bounds.  Reads `starts` on the host, and clears rows that
    belong to no sequence."""
    parts = rotate_heads(qkv, cos, sin, heads)
    q, k, v = (part.transpose(0, 1) for part in parts)
    out = torch.zeros_like(q)
    for begin, end in itertools.pairwise(starts.tolist()):
        rows = slice(begin, end)
        scores = _wide(q[:, rows]) @ _wide(k[:, rows]).transpose(1, 2) * scale
        out[:, rows] = (scores.softmax(-1) @ _wide(v[:, rows])).to(qkv.dtype)
    return out.transpose(0, 1).flatten(1)


def activate(x: torch.Tensor, activation: str, *, gated: bool = False) -> torch.Tensor:
    """``kernels.activate.activate``."""
    wide, factor = _wide(x), None
    if gated:
        wide, factor = wide.chunk(2, dim=-1)
    if activation == "gelu":
        wide = F.gelu(wide)
    elif activation == "gelu_tanh":
        wide = F.gelu(wide, approximate="tanh")
    elif activation == "quick_gelu":
        wide = wide * torch.sigmoid(1.702 * wide)
    elif activation == "silu":
        wide = F.silu(wide)
    else:
        raise ValueError(
            f"activation: got {activation!r}; use one of {', '.join(ACTIVATIONS)}"
        )
    return (wide if factor is None else wide * factor).to(x.dtype)
