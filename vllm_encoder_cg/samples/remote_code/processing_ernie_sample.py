# SPDX-License-Identifier: Apache-2.0
"""Processor of a sample ERNIE-4.5-VL checkpoint (copied into its folder)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, ProcessorMixin


class SampleErnieImageSettings:
    """The entries of ``preprocessor_config.json``, as attributes."""

    def __init__(self, **entries: Any) -> None:
        self.patch_size = entries["patch_size"]
        self.merge_size = entries["merge_size"]
        self.image_mean = entries["image_mean"]
        self.image_std = entries["image_std"]
        self.rescale_factor = 1 / 255
        self.size = {key: entries[key] for key in ("min_pixels", "max_pixels")}


class SampleErnieProcessor(ProcessorMixin):
    """Cuts images and frames into rows of raw pixels; vLLM normalises them.

    Rows are ``[patches, 3 * patch_size ** 2]`` uint8, those of one 2 x 2 block
    of patches next to each other, images before videos.
    """

    attributes = ["tokenizer"]  # noqa: RUF012
    supports_video_metadata = True
    spatial_conv_size = 2
    temporal_conv_size = 2

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.chat_template = None

    @classmethod
    def from_pretrained(cls, path: str, *args: Any, **kwargs: Any) -> Any:
        entries = json.loads((Path(path) / "preprocessor_config.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls(tokenizer, SampleErnieImageSettings(**entries))

    def __call__(
        self,
        text: list[str],
        images: list[Image.Image],
        videos: list[Any],
        **kwargs: Any,
    ) -> BatchFeature:
        clips = [np.asarray(image.convert("RGB"))[None] for image in images]
        clips += [_even_clip(video) for video in videos]
        rows, grids = [], []
        for clip in clips:
            clip_rows, grid = self._rows(clip)
            rows.append(clip_rows)
            grids.append(grid)
        return BatchFeature(
            {
                "input_ids": torch.tensor([self.tokenizer.encode(text[0])]),
                "images": torch.cat(rows),
                "grid_thw": torch.tensor(grids),
            }
        )

    def _rows(self, clip: np.ndarray) -> tuple[torch.Tensor, tuple[int, int, int]]:
        patch, merge = self.image_processor.patch_size, self.image_processor.merge_size
        height, width = self._resized(*clip.shape[1:3])
        frames = np.stack(
            [
                np.asarray(Image.fromarray(frame).resize((width, height)))
                for frame in clip
            ]
        )
        grid = (len(frames), height // patch, width // patch)
        blocks = torch.from_numpy(frames).view(
            grid[0], grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3
        )
        rows = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(-1, 3 * patch**2)
        return rows, grid

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Round both sides to a multiple of the block, within the pixel limits."""
        settings = self.image_processor
        factor = settings.patch_size * settings.merge_size
        low, high = settings.size["min_pixels"], settings.size["max_pixels"]
        tall = max(factor, round(height / factor) * factor)
        wide = max(factor, round(width / factor) * factor)
        if tall * wide > high:
            scale = math.sqrt(high / (height * width))
            tall = max(factor, math.floor(height * scale / factor) * factor)
            wide = max(factor, math.floor(width * scale / factor) * factor)
        elif tall * wide < low:
            scale = math.sqrt(low / (height * width))
            tall = math.ceil(height * scale / factor) * factor
            wide = math.ceil(width * scale / factor) * factor
        return tall, wide


def _even_clip(video: Any) -> np.ndarray:
    """Drop a video's metadata; repeat the last of an odd number of frames."""
    frames = np.asarray(video[0] if isinstance(video, tuple) else video)
    if len(frames) % 2:
        frames = np.concatenate([frames, frames[-1:]])
    return frames
