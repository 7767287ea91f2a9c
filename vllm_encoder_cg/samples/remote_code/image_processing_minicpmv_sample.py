# SPDX-License-Identifier: Apache-2.0
"""Image processor of a sample MiniCPM-V checkpoint (copied into its folder)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor


class SampleMiniCPMVImageProcessor(BaseImageProcessor):
    """Cuts an image into an overview and, if it is large, a grid of slices.

    Every slice has about ``scale_resolution ** 2`` pixels and its own shape, in
    patches; its patches are laid out in one row, ``[3, patch, patch * patches]``.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012
    im_start_token, im_end_token = "<image>", "</image>"
    im_id_start, im_id_end = "<image_id>", "</image_id>"

    def __init__(
        self,
        max_slice_nums: int = 9,
        scale_resolution: int = 448,
        patch_size: int = 14,
        image_feature_size: int = 64,
        use_image_id: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.max_slice_nums = max_slice_nums
        self.scale_resolution = scale_resolution
        self.patch_size = patch_size
        self.image_feature_size = image_feature_size
        self.use_image_id = use_image_id

    def get_sliced_grid(
        self, image_size: tuple[int, int], max_slice_nums: int | None = None
    ) -> tuple[int, int] | None:
        """The (columns, rows) of slices for a (width, height); None for one slice."""
        width, height = image_size
        most = max_slice_nums or self.max_slice_nums
        count = min(math.ceil(width * height / self.scale_resolution**2), most)
        if count <= 1:
            return None
        grids = [
            (columns, total // columns)
            for total in (count - 1, count, count + 1)
            if 1 < total <= most
            for columns in range(1, total + 1)
            if total % columns == 0
        ]
        wanted = math.log(width / height)
        return min(grids, key=lambda grid: abs(wanted - math.log(grid[0] / grid[1])))

    def get_slice_image_placeholder(
        self,
        image_size: tuple[int, int],
        image_idx: int = 0,
        max_slice_nums: int | None = None,
        use_image_id: bool | None = None,
    ) -> str:
        """The text that stands for an image in an expanded prompt."""
        tokens = "<unk>" * self.image_feature_size
        text = f"{self.im_start_token}{tokens}{self.im_end_token}"
        wants_id = self.use_image_id if use_image_id is None else use_image_id
        if self.use_image_id and wants_id:
            text = f"{self.im_id_start}{image_idx}{self.im_id_end}{text}"
        grid = self.get_sliced_grid(image_size, max_slice_nums)
        if grid is None:
            return text
        row = f"<slice>{tokens}</slice>" * grid[0]
        return text + "\n".join([row] * grid[1])

    def __call__(self, images: Any, **kwargs: Any) -> BatchFeature:
        return self.preprocess(images)

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """Process the images of one prompt, or a list of images per prompt."""
        if isinstance(images, Image.Image):
            images = [images]
        if isinstance(images[0], Image.Image):
            images = [images]
        pixels, sizes, grids = [], [], []
        for prompt_images in images:
            pictures = [
                image if isinstance(image, Image.Image) else Image.fromarray(image)
                for image in prompt_images
            ]
            slices = [part for image in pictures for part in self._slices(image)]
            pixels.append([self._flatten(part) for part in slices])
            sizes.append([image.size for image in pictures])
            patch = self.patch_size
            grids.append(
                torch.tensor([(p.height // patch, p.width // patch) for p in slices])
            )
        return BatchFeature(
            {"pixel_values": pixels, "image_sizes": sizes, "tgt_sizes": grids}
        )

    def _slices(self, image: Image.Image) -> list[Image.Image]:
        image = image.convert("RGB")
        grid = self.get_sliced_grid(image.size)
        parts = [self._resized(image, *image.size, shrink_only=grid is not None)]
        if grid is None:
            return parts
        columns, rows = grid
        cell = self._resized(image, image.width / columns, image.height / rows).size
        large = image.resize((cell[0] * columns, cell[1] * rows))
        for row in range(rows):
            for column in range(columns):
                left, top = column * cell[0], row * cell[1]
                parts.append(large.crop((left, top, left + cell[0], top + cell[1])))
        return parts

    def _resized(
        self, image: Image.Image, width: float, height: float, shrink_only: bool = False
    ) -> Image.Image:
        """Resize to about ``scale_resolution ** 2`` pixels, in whole patches."""
        scale = self.scale_resolution / math.sqrt(width * height)
        if shrink_only:
            scale = min(scale, 1.0)
        patch = self.patch_size
        return image.resize(
            (
                max(patch, round(width * scale / patch) * patch),
                max(patch, round(height * scale / patch) * patch),
            )
        )

    def _flatten(self, image: Image.Image) -> torch.Tensor:
        patch = self.patch_size
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1)
        rows, columns = image.height // patch, image.width // patch
        blocks = pixels.view(rows, patch, columns, patch, 3).permute(4, 1, 0, 2, 3)
        return blocks.reshape(3, patch, rows * columns * patch)
