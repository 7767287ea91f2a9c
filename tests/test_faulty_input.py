# SPDX-License-Identifier: Apache-2.0
"""Input that contradicts itself: no adapter takes it for what it is not.

A user relies on three things: the server goes on; a batch that graphs cannot encode
is left to the model's own path, or comes out as that path has it; and the next
request is right, by graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.small_encoders import (
    ARCHITECTURES,
    VIDEO_ARCHITECTURES,
    Inputs,
    SmallEncoders,
    is_pixels,
    ordinary_images,
    ordinary_videos,
    with_pixels,
)
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.encoder_inputs import image_batch
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import eager_embeddings

TOLERANCE = 1e-4
HUGE = 10**7

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
video_architectures = pytest.mark.parametrize("architecture", VIDEO_ARCHITECTURES)


@pytest.fixture
def manager(
    architecture: str, small_encoders: SmallEncoders
) -> EncoderCudaGraphManager:
    return small_encoders.get(architecture)


@pytest.fixture
def expected(architecture: str, small_encoders: SmallEncoders) -> list[torch.Tensor]:
    return small_encoders.expected(architecture)


def assert_equal(
    outputs: list[torch.Tensor] | None, expected: list[torch.Tensor]
) -> None:
    assert outputs is not None
    errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
    assert max(errors) < TOLERANCE


def assert_next_is_right(
    manager: EncoderCudaGraphManager, expected: list[torch.Tensor]
) -> None:
    hits = manager.stats.hits
    assert_equal(manager.execute(ordinary_images(manager)), expected)
    assert manager.stats.hits == hits + 3


# -- Pixels that are not what the sizes say -----------------------------------------


def one_row_less(pixels: torch.Tensor) -> torch.Tensor:
    return pixels[..., :-1] if pixels.ndim == 3 and pixels.shape[0] == 3 else pixels[1:]


def one_row_more(pixels: torch.Tensor) -> torch.Tensor:
    dim = -1 if pixels.ndim == 3 and pixels.shape[0] == 3 else 0
    return torch.cat([pixels, pixels.narrow(dim, 0, 1)], dim)


def other_kind(pixels: torch.Tensor) -> torch.Tensor:
    """Bytes for floating-point numbers, and the reverse."""
    if pixels.is_floating_point():
        return (pixels * 20 + 128).to(torch.uint8)
    return pixels.float()


BAD_PIXELS: dict[str, Callable[[torch.Tensor], Any]] = {
    "fewer than claimed": one_row_less,
    "more than claimed": one_row_more,
    "none": lambda pixels: pixels[:0],
    "flat": torch.flatten,
    "one dimension more": lambda pixels: pixels[None],
    "narrower": lambda pixels: pixels[..., :-1],
    "other kind": other_kind,
    "int64": lambda pixels: pixels.long(),
    "bool": lambda pixels: pixels > 0,
    "complex": lambda pixels: pixels.to(torch.complex64),
    "another device": lambda pixels: pixels.to("meta"),
    "NumPy": lambda pixels: pixels.numpy(),
    "text": lambda pixels: "pixels",
    "missing": lambda pixels: None,
}


@each_architecture
@pytest.mark.parametrize("change", BAD_PIXELS)
def test_bad_pixels_go_to_the_model(
    change: str, manager: EncoderCudaGraphManager, expected: list[torch.Tensor]
) -> None:
    bad = with_pixels(ordinary_images(manager), BAD_PIXELS[change])
    assert manager.execute(bad) is None
    assert_next_is_right(manager, expected)


SAME_PIXELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": lambda pixels: torch.stack([pixels, pixels], dim=-1)[..., 0],
    "reversed twice": lambda pixels: pixels.flip(0).contiguous().flip(0),
    "in a larger tensor": lambda pixels: torch.cat([pixels, pixels])[: len(pixels)],
    "double": lambda p: p.double() if p.is_floating_point() else p,
}


@each_architecture
@pytest.mark.parametrize("change", SAME_PIXELS)
def test_the_same_pixels_in_another_form(
    change: str, manager: EncoderCudaGraphManager, expected: list[torch.Tensor]
) -> None:
    """Taken and right, or left to the model."""
    outputs = manager.execute(
        with_pixels(ordinary_images(manager), SAME_PIXELS[change])
    )
    if outputs is not None:
        assert_equal(outputs, expected)
    else:
        assert change == "double"
    assert_next_is_right(manager, expected)


# -- Sizes that are not what the pixels are -------------------------------------------

#: Inputs that say something else than how much there is.
NO_SIZES = ("image_token_id", "aspect_ratios")


def with_sizes(inputs: Inputs, change: Callable[[torch.Tensor], Any]) -> Inputs:
    def apply(value: Any) -> Any:
        if isinstance(value, list):
            return [apply(each) for each in value]
        return change(value)

    return {
        name: value if is_pixels(name) or name in NO_SIZES else apply(value)
        for name, value in inputs.items()
    }


BAD_SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "more": lambda sizes: sizes + 2,
    "huge": lambda sizes: sizes * HUGE,
    "negative": lambda sizes: -sizes - 2,
    "beyond int32": lambda sizes: sizes + 2**40,
    "floating point": lambda sizes: sizes + 0.5,
    "another shape": lambda sizes: sizes[None, None, ..., None],
    "none": lambda sizes: sizes[:0],
    "text": lambda sizes: "sizes",
    "missing": lambda sizes: None,
}


@each_architecture
@pytest.mark.parametrize("change", BAD_SIZES)
def test_bad_sizes_go_to_the_model(
    change: str, manager: EncoderCudaGraphManager, expected: list[torch.Tensor]
) -> None:
    bad = with_sizes(ordinary_images(manager), BAD_SIZES[change])
    outputs = manager.execute(bad)
    if outputs is None:
        pass
    elif "pixel_position_ids" in bad:
        # Gemma 4's are where patches lie, made by vLLM's processor and known to the
        # device alone: what they say is not checked, but none beyond a table is
        # looked up.
        if change in ("huge", "beyond int32"):
            assert all(bool(each.isnan().all()) for each in outputs)
    else:
        assert change == "another shape"  # of the same numbers
        assert_equal(outputs, expected)
    assert_next_is_right(manager, expected)


@each_architecture
def test_one_image_more_than_there_is(
    manager: EncoderCudaGraphManager, expected: list[torch.Tensor]
) -> None:
    """The sizes of the batch, once more its last."""
    inputs = ordinary_images(manager)
    if "pixel_position_ids" in inputs:
        inputs["pixel_position_ids"] = torch.cat([inputs["pixel_position_ids"]] * 2)
        bad = inputs
    else:
        bad = {
            name: value
            if is_pixels(name) or name in NO_SIZES
            else [*value, value[-1]]
            if isinstance(value, list)
            else torch.cat([value, value[-1:]])
            for name, value in inputs.items()
        }
    assert manager.execute(bad) is None
    assert_next_is_right(manager, expected)


@each_architecture
def test_no_items(
    manager: EncoderCudaGraphManager, expected: list[torch.Tensor]
) -> None:
    """Nothing in, nothing out; or it is left to the model."""
    none = {
        name: value if name in NO_SIZES else value[:0]
        for name, value in ordinary_images(manager).items()
    }
    assert not manager.execute(none)
    assert manager.execute({}) is None
    assert_next_is_right(manager, expected)


@video_architectures
def test_images_and_videos_at_once_go_to_the_model(
    manager: EncoderCudaGraphManager, expected: list[torch.Tensor]
) -> None:
    both = ordinary_images(manager) | ordinary_videos(manager)
    assert manager.execute(both) is None
    assert_next_is_right(manager, expected)


# -- Sizes at the edges --------------------------------------------------------------


@video_architectures
def test_ten_thousand_frames_are_eager(
    manager: EncoderCudaGraphManager, expected: list[torch.Tensor]
) -> None:
    """Refused by their number, without being looked at one by one."""
    inputs = lengthen(ordinary_videos(manager), 10_000)
    before = manager.stats.misses[EagerReason.ABOVE_EVERY_BUDGET]
    assert manager.execute(inputs) is None
    assert manager.stats.misses[EagerReason.ABOVE_EVERY_BUDGET] == before + 1
    assert_next_is_right(manager, expected)


def lengthen(inputs: Inputs, frames: int) -> Inputs:
    """One video whose frames are all the first one, without memory for each."""
    (pixels,) = [name for name in inputs if is_pixels(name)]
    value = inputs[pixels]
    if isinstance(value, list):  # MiniCPM-V: a slice per frame
        (sizes,) = [name for name in inputs if name != pixels]
        return {
            pixels: [[value[0][0]] * frames],
            sizes: [inputs[sizes][0][:1].expand(frames, -1)],
        }
    if "video_grid_thw" in inputs:
        _, height, width = inputs["video_grid_thw"][0].tolist()
        rows = frames * height * width
        return {
            pixels: value[:1].expand(rows, *value.shape[1:]),
            "video_grid_thw": torch.tensor([[frames, height, width]]),
        }
    longer = {
        name: tensor[:1].expand(frames, *tensor.shape[1:])
        for name, tensor in inputs.items()
        if is_pixels(name) or "position" in name
    }
    if "video_frame_counts" in inputs:  # Gemma 4
        tokens = inputs["video_num_soft_tokens"][0][0]
        counts = {
            "video_frame_counts": torch.tensor([frames]),
            "video_num_soft_tokens": [[tokens] * frames],
        }
    else:
        counts = {"video_num_patches": torch.tensor([frames])}
    return inputs | longer | counts


@each_architecture
def test_the_smallest_image(
    manager: EncoderCudaGraphManager, expected: list[torch.Tensor]
) -> None:
    """As few patches as the tower takes, among ordinary ones."""
    inputs = image_batch(manager.adapter, [(1, 1), (64, 64), (1, 1)], 1)
    assert_equal(manager.execute(inputs), eager_embeddings(manager.model, inputs))
    assert_next_is_right(manager, expected)


@each_architecture
def test_strips(manager: EncoderCudaGraphManager, expected: list[torch.Tensor]) -> None:
    """Images a hundred times as long as they are wide."""
    inputs = image_batch(manager.adapter, [(1600, 16), (16, 1600)], 1)
    outputs = manager.execute(inputs)
    if outputs is not None:
        assert_equal(outputs, eager_embeddings(manager.model, inputs))
    assert_next_is_right(manager, expected)
