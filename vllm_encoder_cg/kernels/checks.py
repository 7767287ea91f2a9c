# SPDX-License-Identifier: Apache-2.0
"""Every kernel of a fused forward against its plain reference, over shapes, dtypes
and strides: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from vllm_encoder_cg.kernels import reference

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative norm: a unit in the last place.  A GPU comes much closer in bfloat16;
Triton's interpreter cuts off where it should round."""

WIDTHS = (1152, 1280, 1536)
HEADS = ((16, 72), (16, 80), (12, 128), (8, 64))
"""Heads and their size."""
MLP_WIDTHS = (4304, 3420, 5120)
ROWS = (1, 196, 4096)


@dataclass(frozen=True)
class KernelCheck:
    """One comparison."""

    kernel: str
    case: str
    dtype: str
    error: float
    """Relative norm of the difference; infinite where it is not finite."""
    ok: bool


def compare_all(
    device: torch.device,
    rows: Sequence[int] = ROWS,
    widths: Sequence[int] = WIDTHS,
    heads: Sequence[tuple[int, int]] = HEADS,
    mlp_widths: Sequence[int] = MLP_WIDTHS,
) -> list[dict[str, Any]]:
    """All comparisons, as flat records."""
    torch.manual_seed(0)
    found: list[KernelCheck] = []
    for dtype in _TOLERANCE:
        for count in rows:
            for width in widths:
                found += _check_norms(device, dtype, count, width)
            for number, size in heads:
                found += _check_rotation(device, dtype, count, number, size)
            for width in mlp_widths:
                found += _check_activations(device, dtype, count, width)
        # Triton's interpreter has no products of bfloat16.
        if dtype == torch.float16 or (device.type == "cuda" and dtype != torch.float32):
            for number, size in heads:
                found += _check_attention(device, dtype, number, size)
        if device.type == "cuda" and dtype != torch.float32:
            found += _check_epilogue(device, dtype)
    return [asdict(each) for each in found]


def _compare(
    kernel: str,
    case: str,
    results: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> KernelCheck:
    dtype = results[0].dtype
    error = 0.0
    for result, expected in zip(results, references, strict=True):
        difference = (result.double() - expected.double()).norm()
        relative = difference / expected.double().norm().clamp(min=1e-12)
        finite = bool(result.isfinite().all()) and result.shape == expected.shape
        error = max(error, float(relative) if finite else float("inf"))
    name = str(dtype).removeprefix("torch.")
    return KernelCheck(kernel, case, name, error, error <= _TOLERANCE[dtype])


def _check_norms(
    device: torch.device, dtype: torch.dtype, rows: int, width: int
) -> Iterator[KernelCheck]:
    from vllm_encoder_cg.kernels.add_norm import add_norm

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    weight, bias, scale = (1 + random(width) / 10 for _ in range(3))
    # Rows of a wider tensor: strides are not the width.
    x, delta = random(rows, width + 8)[:, :width], random(rows, width)
    # And of a convolution, whose columns lie together.
    apart, added = random(width, rows).t(), random(width, rows).t()
    yield _compare(
        "add_norm",
        f"columns together, {rows} x {width}",
        add_norm(apart, added, weight, bias, 1e-6, centred=True),
        reference.add_norm(apart, added, weight, bias, 1e-6, centred=True),
    )
    for centred in (True, False):
        for name, arguments in {
            "whole": (delta, weight, bias),
            "without addition": (None, weight, bias),
            "without parameters": (delta, None, None),
        }.items():
            for factor in (None, scale):
                keywords: dict[str, Any] = {"centred": centred, "scale": factor}
                yield _compare(
                    "add_norm",
                    f"{name}, centred {centred}, scaled {factor is not None}, "
                    f"{rows} x {width}",
                    add_norm(x, *arguments, 1e-6, **keywords),
                    reference.add_norm(x, *arguments, 1e-6, **keywords),
                )


def _check_rotation(
    device: torch.device, dtype: torch.dtype, rows: int, heads: int, size: int
) -> Iterator[KernelCheck]:
    from vllm_encoder_cg.kernels.rotate_heads import rotate_heads

    qkv = torch.randn((rows, 3 * heads * size), device=device).to(dtype)
    angles = torch.randn((rows, size // 2), device=device)
    # As complex factors hold them, and as tables in the model's dtype do.
    strided = torch.stack((angles.cos(), angles.sin()), -1).unbind(-1)
    tables = tuple(each.to(dtype).contiguous() for each in strided)
    total = torch.tensor([max(1, rows - 3)], dtype=torch.int32, device=device)
    for (cos, sin), row_total, interleaved, in_place in product(
        (strided, tables), (None, total), (False, True), (False, True)
    ):
        given = qkv.clone()
        if row_total is not None:
            given[int(row_total) :] = torch.nan
        yield _compare(
            "rotate_heads",
            f"{rows} x {heads} x {size}, cos {cos.dtype}, padded "
            f"{row_total is not None}, interleaved {interleaved}, in place {in_place}",
            rotate_heads(
                given,
                cos,
                sin,
                heads,
                row_total,
                interleaved=interleaved,
                in_place=in_place,
            ),
            reference.rotate_heads(
                qkv, cos, sin, heads, row_total, interleaved=interleaved
            ),
        )


def _check_attention(
    device: torch.device, dtype: torch.dtype, heads: int, size: int
) -> Iterator[KernelCheck]:
    from vllm_encoder_cg.kernels.short_attention import (
        sequence_bounds,
        short_attention,
    )
    from vllm_encoder_cg.kernels.window_attention import window_attention

    angles = torch.randn((1024, size // 2), device=device)
    # As complex factors hold them.
    cos, sin = torch.stack((angles.cos(), angles.sin()), -1).unbind(-1)
    for lengths in ([64, 1, 16, 63, 0, 0], [130, 1, 5, 0], [600]):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        real = sum(lengths)
        # More rows than belong to a sequence, which nothing must reach.
        rows = real + 5
        qkv = torch.randn((rows, 3 * heads * size), device=device).to(dtype)
        qkv[real:] = torch.nan
        tables, scale = (cos[:rows], sin[:rows]), size**-0.5
        starts = starts.to(device)
        case = f"{lengths} x {heads} x {size}"
        expected = reference.rotated_attention(qkv, *tables, heads, starts, scale)
        bounds = sequence_bounds(starts, rows)
        result = short_attention(qkv, *tables, heads, bounds, scale)
        yield _compare("short_attention", case, [result[:real]], [expected[:real]])
        if max(lengths) <= 64:
            flat_cos, flat_sin = (table.contiguous() for table in tables)
            result = window_attention(qkv, flat_cos, flat_sin, heads, starts, scale)
            yield _compare("window_attention", case, [result[:real]], [expected[:real]])


def _check_activations(
    device: torch.device, dtype: torch.dtype, rows: int, width: int
) -> Iterator[KernelCheck]:
    from vllm_encoder_cg.kernels.activate import activate

    for activation, gated in product(reference.ACTIVATIONS, (False, True)):
        columns = 2 * width if gated else width
        x = 3 * torch.randn((rows, columns + 8), device=device).to(dtype)[:, :columns]
        yield _compare(
            "activate",
            f"{activation}, gated {gated}, {rows} x {width}",
            [activate(x, activation, gated=gated)],
            [reference.activate(x, activation, gated=gated)],
        )


def _check_epilogue(device: torch.device, dtype: torch.dtype) -> Iterator[KernelCheck]:
    """That GELU in the epilogue of a product is of the tanh kind."""
    x = torch.randn((196, 1152), device=device).to(dtype)
    weight = (torch.randn((4304, 1152), device=device) / 34).to(dtype)
    bias = torch.randn(4304, device=device).to(dtype)
    product_ = torch.addmm(bias.double(), x.double(), weight.double().t())
    expected = reference.activate(product_, "gelu_tanh")
    yield _compare(
        "product with GELU",
        "196 x 1152 x 4304",
        [torch._addmm_activation(bias, x, weight.t(), use_gelu=True)],
        [expected.to(dtype)],
    )
