# SPDX-License-Identifier: Apache-2.0
"""How much of a difference from eager rounding explains."""

from __future__ import annotations

import pytest
import torch

from tests.support.encoders import Encoders
from vllm_encoder_cg.samples.encoder_inputs import image_batch
from vllm_encoder_cg.startup.rounding import allowed_error, nudge
from vllm_encoder_cg.verification import eager_embeddings

ONES = [torch.ones(4, 8)]


@pytest.mark.parametrize(
    ("spread", "allowed"),
    [
        # A steady encoder keeps the tolerance,
        (0.0, 1e-2),
        (0.5e-2, 1e-2),
        # an unsteady one gets a little more than it differs from itself,
        (1.2e-2, 1.5e-2),
        # and none gets more than twice the tolerance.
        (9e-2, 2e-2),
        (float("nan"), 1e-2),
    ],
)
def test_allowed_error(spread: float, allowed: float) -> None:
    moved = [ONES[0] * (1 + spread)]
    assert allowed_error(1e-2, moved, ONES) == pytest.approx(allowed, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_nudge_is_one_last_bit_of_few_values(dtype: torch.dtype) -> None:
    pixels = torch.randn(64, 48).to(dtype)
    grid = torch.tensor([[1, 8, 8]])
    tiles = [torch.randn(3, 14, 14), torch.zeros(2, 2, dtype=torch.uint8)]
    given = {"pixel_values": pixels, "grid": grid, "tiles": tiles, "count": 2}
    moved = nudge(given, dtype)
    assert moved["pixel_values"].dtype == dtype
    changed = moved["pixel_values"] != pixels
    assert 0 < changed.float().mean() <= 1 / 16
    assert torch.allclose(
        moved["pixel_values"].float(), pixels.float(), rtol=4 * torch.finfo(dtype).eps
    )
    assert torch.equal(moved["grid"], grid) and moved["count"] == 2
    first = int(dtype.itemsize == 2)
    assert moved["tiles"][1].tolist() == [[first, 0], [0, 0]]
    assert torch.equal(given["pixel_values"], pixels)


def test_another_image_is_not_mistaken_for_rounding(encoders: Encoders) -> None:
    manager = encoders.get("Qwen3VLForConditionalGeneration").manager
    mm_kwargs = image_batch(manager.adapter, [(64, 64), (64, 64)], 0)
    references = eager_embeddings(manager.model, mm_kwargs)
    moved = eager_embeddings(manager.model, nudge(mm_kwargs, torch.float32))
    assert allowed_error(1e-4, moved, references) == 1e-4
    assert allowed_error(1e-4, references[::-1], references) == 2e-4
