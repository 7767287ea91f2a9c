# SPDX-License-Identifier: Apache-2.0
"""Triton kernels equal the tensor operations that they stand for.

They run in Triton's interpreter here, in a process of their own, because it has
to be chosen before Triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from tests.support.module_runs import run_with_triton
from vllm_encoder_cg.models import grid_rows, windows
from vllm_encoder_cg.models.grid_rows import GridRows

Frames = Sequence[tuple[int, int]]
"""Height and width of each, in patches."""

MIXES: dict[str, Frames] = {
    "one row and one column": [(2, 14), (12, 2)],
    "mixed": [(2, 2), (6, 4), (8, 10), (2, 8)],
    "as large as the table": [(6, 6)],
}


def tables(frames: Frames, room: int) -> tuple[torch.Tensor, ...]:
    """Row offsets, heights and widths with room for more sequences."""
    spare = room - len(frames)
    lengths = [h * w for h, w in frames]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return (
        torch.tensor(starts + [starts[-1]] * spare, dtype=torch.int32),
        torch.tensor([h for h, _ in frames] + [2] * spare, dtype=torch.int32),
        torch.tensor([w for _, w in frames] + [2] * spare, dtype=torch.int32),
    )


def compare_all() -> None:
    """Every kernel on every mix, with padded rows and spare sequences."""
    from vllm_encoder_cg.kernels.bicubic_positions import bicubic_positions
    from vllm_encoder_cg.kernels.bilinear_positions import bilinear_positions
    from vllm_encoder_cg.kernels.locate_rows import locate_rows
    from vllm_encoder_cg.kernels.rotary_tables import rotary_tables
    from vllm_encoder_cg.kernels.window_order import window_order

    torch.manual_seed(0)
    side, hidden = 6, 20
    table = torch.randn(side * side, hidden)
    cache = torch.randn(32, 10)
    cos_cache, sin_cache = cache.chunk(2, dim=-1)
    for name, frames in MIXES.items():
        for merge, spare in ((2, 5), (1, 0)):
            starts, heights, widths = tables(frames, len(frames) + spare)
            real = int(starts[-1])
            rows = real + 8
            index = torch.arange(rows, dtype=torch.int32)
            places = grid_rows.locate_rows(starts, heights, widths, index, merge)
            arguments = (starts, heights, widths, rows, merge)

            found = bilinear_positions(table, side, *arguments)
            expected = grid_rows.bilinear_positions(table, side, places)
            torch.testing.assert_close(found[:real], expected[:real], msg=name)
            assert not found[real:].any(), name

            for normalised in (True, False):
                found = bicubic_positions(table, side, side, *arguments, normalised)
                expected = grid_rows.bicubic_positions(table, side, side, places)
                torch.testing.assert_close(
                    found[:real], expected[:real], rtol=1e-4, atol=1e-5, msg=name
                )
                assert not found[real:].any(), name

            found = GridRows(*locate_rows(*arguments))
            for field in ("row", "col", "height", "width", "start"):
                assert torch.equal(getattr(found, field), getattr(places, field)), name

            for window in (2, 4):
                units = rows // merge**2
                into, order = window_order(*arguments[:3], units, merge, window)
                expected = windows.window_places(places, merge, window)
                assert torch.equal(into, expected), name
                back = windows.invert_permutation(expected, index[:units])
                assert torch.equal(order, back), name

            cos, sin = rotary_tables(cache, *arguments)
            expected_cos, expected_sin = grid_rows.rotary_2d(
                cos_cache, sin_cache, places.places()
            )
            assert torch.equal(cos[:real], expected_cos[:real]), name
            assert torch.equal(sin[:real], expected_sin[:real]), name
            assert cos.isfinite().all() and sin.isfinite().all(), name


def compare_fused() -> None:
    """Every kernel of fused forwards, with rows and heads that fill no block."""
    from vllm_encoder_cg.kernels import checks

    found = checks.compare_all(
        torch.device("cpu"),
        rows=(5,),
        widths=(20,),
        heads=((3, 20),),
        mlp_widths=(40,),
    )
    wrong = [check for check in found if not check["ok"]]
    assert found and not wrong, wrong[:5]


def test_kernels_equal_tensor_operations() -> None:
    run_with_triton("tests.test_kernels", os.environ | {"TRITON_INTERPRET": "1"})


if __name__ == "__main__":
    compare_all()
    compare_fused()
