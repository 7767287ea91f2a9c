# SPDX-License-Identifier: Apache-2.0
"""Processor of a sample Kimi-VL checkpoint (copied into its folder)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, ProcessorMixin


class SampleKimiImageSettings:
    """The entries of ``preprocessor_config.json``, as attributes."""

    def __init__(self, **entries: Any) -> None:
        self.patch_size = entries["patch_size"]
        self.merge_kernel_size = entries["merge_kernel_size"]
        self.in_token_limit = entries["in_token_limit"]
        self.image_mean = entries["image_mean"]
        self.image_std = entries["image_std"]


class SampleKimiProcessor(ProcessorMixin):
    """Cuts images into patches ``[patches, 3, 14, 14]``, row by row."""

    attributes = ["tokenizer"]  # noqa: RUF012
    image_token = "<|media_pad|>"

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.chat_template = None

    @classmethod
    def from_pretrained(cls, path: str, *args: Any, **kwargs: Any) -> Any:
        entries = json.loads((Path(path) / "preprocessor_config.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls(tokenizer, SampleKimiImageSettings(**entries))

    def __call__(
        self, text: str, images: list[Image.Image], **kwargs: Any
    ) -> BatchFeature:
        patches, grids = zip(*map(self._patches, images), strict=True)
        return BatchFeature(
            {
                "input_ids": torch.tensor([self.tokenizer.encode(text)]),
                "pixel_values": torch.cat(patches),
                "image_grid_hws": torch.tensor(grids),
            }
        )

    def _patches(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        """Shrink an image above the limit, pad it to whole blocks, cut it up."""
        settings = self.image_processor
        patch = settings.patch_size
        width, height = image.size
        count = (width // patch) * (height // patch)
        if count > settings.in_token_limit:
            scale = math.sqrt(settings.in_token_limit / count)
            width, height = int(width * scale), int(height * scale)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        block_height, block_width = (
            side * patch for side in settings.merge_kernel_size
        )
        padding = ((0, -height % block_height), (0, -width % block_width), (0, 0))
        pixels = np.pad(np.asarray(image.convert("RGB")), padding)
        pixels = (pixels / 255 - settings.image_mean) / settings.image_std
        grid = (pixels.shape[0] // patch, pixels.shape[1] // patch)
        blocks = (
            torch.from_numpy(pixels).float().view(grid[0], patch, grid[1], patch, 3)
        )
        return blocks.permute(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch), grid
