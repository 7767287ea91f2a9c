# SPDX-License-Identifier: Apache-2.0
"""Sample images and videos are what vLLM takes, and the same for the same seed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from vllm_encoder_cg.samples import media


def test_photographs_come_with_their_names_and_sizes() -> None:
    sizes = {name: image.size for name, image in media.photographs()}
    expected = {
        "grace_hopper": (512, 600),
        "china": (640, 427),
        "flower": (640, 427),
    }
    assert sizes
    assert sizes.items() <= expected.items()


def test_without_photographs_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"vllm-encoder-cg\[demo\]"):
        media.photographs()


def test_random_images_depend_on_the_seed() -> None:
    image = media.random_image(60, 40, seed=1)
    assert (image.size, image.mode) == ((60, 40), "RGB")
    assert image == media.random_image(60, 40, seed=1)
    assert image != media.random_image(60, 40, seed=2)


@pytest.mark.parametrize("frames", [2, 5])
def test_a_video_moves_and_has_vllms_metadata(frames: int) -> None:
    video, metadata = media.make_video(frames, height=40, width=60, seed=1)
    assert (video.shape, video.dtype) == ((frames, 40, 60, 3), np.uint8)
    assert np.array_equal(video, media.make_video(frames, 40, 60, seed=1)[0])
    changes = np.abs(np.diff(video.astype(int), axis=0)).mean(axis=(1, 2, 3))
    assert (changes > 1).all()
    assert metadata["total_num_frames"] == frames
    assert metadata["frames_indices"] == list(range(frames))
    assert metadata["duration"] * metadata["fps"] == frames
    assert metadata["do_sample_frames"] is False


def test_a_video_can_be_cut_from_an_image() -> None:
    grey = media.random_image(100, 100, seed=1).convert("L").convert("RGB")
    video, _ = media.make_video(3, height=40, width=60, image=grey)
    assert (video[..., 0] == video[..., 1]).all()


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="frames must be at least 2, got 1"):
        media.make_video(1, 40, 60)
    with pytest.raises(ValueError, match="width must be at least 1 pixel, got 0"):
        media.random_image(0, 40, seed=1)
