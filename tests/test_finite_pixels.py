# SPDX-License-Identifier: Apache-2.0
"""An image whose pixels are not finite spoils its own embedding and no other.

On a GPU, attention reads across the borders of images; the CPU's does not.  So the
tests look at what reaches the tower, and at what comes out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.small_encoders import SmallEncoders
from tests.support.variants import make_variant
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.finite_pixels import (
    split_finite,
    spoil_tokens,
    spread_over_sequences,
)
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter
from vllm_encoder_cg.models.tiled_tower import TiledTowerAdapter
from vllm_encoder_cg.samples.encoder_inputs import image_batch, video_batch

NAN, INF = float("nan"), float("inf")
ERNIE = "Ernie4_5_VLMoeForConditionalGeneration"
KIMI = "KimiVLForConditionalGeneration"
INTERNVL = "InternVLChatModel"
GEMMA3 = "Gemma3ForConditionalGeneration"
ARCHITECTURES = (ERNIE, KIMI, INTERNVL, GEMMA3)

bad_values = pytest.mark.parametrize("value", [NAN, INF, -INF])


@pytest.fixture(params=ARCHITECTURES)
def manager(
    request: pytest.FixtureRequest,
    small_encoders: SmallEncoders,
    monkeypatch: pytest.MonkeyPatch,
) -> EncoderCudaGraphManager:
    """Captured so that a tower which gets what is not finite fails."""
    base = small_encoders.get(request.param)
    seen = "tower_forward" if request.param in (ERNIE, KIMI) else "captured_encode"
    original = getattr(type(base.adapter), seen)

    def forward(self: Any, first: Any, *rest: Any) -> torch.Tensor:
        pixels = first if isinstance(first, torch.Tensor) else first.pixels
        assert pixels.isfinite().all()
        return original(self, first, *rest)

    monkeypatch.setattr(type(base.adapter), seen, forward)
    manager = make_variant(base, monkeypatch, budgets=(64, 256), cost_model=False)
    manager.capture()
    return manager


def row_offsets(manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]) -> Any:
    batch = manager.adapter.parse(mm_kwargs)
    assert batch is not None
    if isinstance(manager.adapter, TiledTowerAdapter):
        return next(iter(batch.payload.tiles.values())).offsets
    assert isinstance(manager.adapter, PackedTowerAdapter)
    return batch.payload.row_offsets


@bad_values
def test_the_neighbours_are_bitwise_the_same(
    manager: EncoderCudaGraphManager, value: float
) -> None:
    clean = image_batch(manager.adapter, [(64, 64), (128, 96), (96, 64)], 0)
    (name,) = [key for key in clean if key.startswith("pixel_values")]
    offsets = row_offsets(manager, clean)
    expected = manager.execute(clean)
    spoilt = clean[name].clone()
    spoilt[offsets[1]].view(-1)[0] = value  # a single number
    outputs = manager.execute(clean | {name: spoilt})
    assert expected is not None and outputs is not None
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[2], expected[2])
    assert outputs[1].isnan().any()
    after = manager.execute(clean)
    assert after is not None and all(map(torch.equal, after, expected))
    assert manager.stats.hits == 9


def test_a_spoilt_image_is_spoilt_as_by_eager(
    manager: EncoderCudaGraphManager,
) -> None:
    """Everywhere, so that nothing sensible-looking comes of it."""
    mm_kwargs = image_batch(manager.adapter, [(128, 96)], 0)
    (name,) = [key for key in mm_kwargs if key.startswith("pixel_values")]
    mm_kwargs[name][0].view(-1)[0] = NAN
    (output,) = manager.execute(mm_kwargs) or ()
    tile = len(output) // len(mm_kwargs[name])
    packed = isinstance(manager.adapter, PackedTowerAdapter)
    assert output[: None if packed else tile].isnan().all()


@pytest.mark.parametrize("manager", [ERNIE], indirect=True)
@pytest.mark.parametrize("frame", [2, 3])
def test_one_frame_of_a_pair_spoils_the_pair(
    manager: EncoderCudaGraphManager, frame: int
) -> None:
    """Tokens of ERNIE-4.5-VL's videos are made from two frames."""
    mm_kwargs = video_batch(manager.adapter, [(2, 64, 64), (6, 64, 64)], 0)
    pixels = mm_kwargs["pixel_values_videos"]
    rows = len(pixels) // 8
    pixels[(2 + frame) * rows] = NAN
    outputs = manager.execute(mm_kwargs)
    assert outputs is not None
    assert outputs[0].isfinite().all()
    pairs = outputs[1].unflatten(0, (3, -1))
    assert [bool(pair.isnan().all()) for pair in pairs] == [False, True, False]
    assert pairs[0].isfinite().all() and pairs[2].isfinite().all()


# -- The operations ------------------------------------------------------------------


def test_finite_pixels_are_left_as_they_are() -> None:
    pixels = torch.randn(5, 3, 2, 2).bfloat16() * 1e4
    clean, marks = split_finite(pixels)
    assert torch.equal(clean, pixels)
    assert torch.equal(marks, torch.zeros(5))


@bad_values
def test_what_is_not_finite_becomes_zero_and_is_marked(value: float) -> None:
    pixels = torch.ones(4, 6)
    pixels[1, 2] = pixels[3, 0] = pixels[3, 5] = value
    clean, marks = split_finite(pixels)
    assert torch.equal(clean, torch.where(pixels == 1, 1.0, 0.0))
    assert marks.isnan().tolist() == [False, True, False, True]


def test_opposite_infinities_do_not_cancel() -> None:
    _, marks = split_finite(torch.tensor([[INF, -INF], [1.0, -1.0]]))
    assert marks.isnan().tolist() == [True, False]


def test_marks_go_from_rows_to_the_tokens_of_their_sequence() -> None:
    marks = torch.zeros(10)
    marks[3] = marks[9] = NAN  # 9 belongs to no sequence
    starts = torch.tensor([0, 2, 4, 8, 8], dtype=torch.int32)
    sequences = spread_over_sequences(marks, starts)
    assert sequences.isnan().tolist() == [False, True, False, False]
    tokens = spoil_tokens(
        torch.ones(5, 2), sequences, starts // 2, torch.arange(5, dtype=torch.int32)
    )
    assert tokens.isnan().any(1).tolist() == [False, True, False, False, False]
    assert torch.equal(tokens[[0, 2, 3, 4]], torch.ones(4, 2))
