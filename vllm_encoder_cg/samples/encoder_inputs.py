# SPDX-License-Identifier: Apache-2.0
"""Random encoder inputs for images and videos of given pixel sizes.

The keyword arguments of ``embed_multimodal`` as a model's processor would make
them, without the processor and at any size.  How they look depends on the
family of the adapter's tower: each family has a maker, found by the adapter's
base classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vllm_encoder_cg.adapter import EncoderAdapter
from vllm_encoder_cg.models.gemma4 import Gemma4Adapter
from vllm_encoder_cg.models.minicpmv import MiniCPMVAdapter
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter
from vllm_encoder_cg.models.padded_samples import TokenGrid, fit_grid
from vllm_encoder_cg.models.tiled_tower import TiledTowerAdapter
from vllm_encoder_cg.verification_cases import MediaBatch

ImageSize = tuple[int, int]
"""(width, height) in pixels."""
VideoSize = tuple[int, int, int]
"""(frames, width, height)."""


class InputMaker(Protocol):
    """Makes inputs for the adapters of one tower family."""

    def images(
        self, adapter: Any, sizes: Sequence[ImageSize], generator: torch.Generator
    ) -> dict[str, Any]:
        """Keyword arguments of a batch of images."""
        ...

    def videos(
        self, adapter: Any, clips: Sequence[VideoSize], generator: torch.Generator
    ) -> dict[str, Any]:
        """Keyword arguments of a batch of videos."""
        ...


def image_batch(
    adapter: EncoderAdapter, sizes: Sequence[ImageSize], seed: int
) -> dict[str, Any]:
    """Keyword arguments of ``embed_multimodal`` for random images.

    Args:
        sizes: (width, height) in pixels; rounded down to whole patches, at
            least one output token.
        seed: equal seeds give equal values on one kind of device.

    Raises:
        NotImplementedError: the adapter's family has no maker.
    """
    return _find_maker(adapter).images(adapter, sizes, _generator(adapter, seed))


def video_batch(
    adapter: EncoderAdapter, clips: Sequence[VideoSize], seed: int
) -> dict[str, Any]:
    """Likewise for random videos of (frames, width, height)."""
    return _find_maker(adapter).videos(adapter, clips, _generator(adapter, seed))


def media_batch(
    adapter: EncoderAdapter, batch: MediaBatch, seed: int
) -> dict[str, Any]:
    """Likewise for the items of a batch, of either modality."""
    if batch.modality == "video":
        clips = [(item.frames, item.width, item.height) for item in batch.items]
        return video_batch(adapter, clips, seed)
    return image_batch(adapter, [(i.width, i.height) for i in batch.items], seed)


def _find_maker(adapter: EncoderAdapter) -> InputMaker:
    for cls in type(adapter).__mro__:
        if cls in _MAKERS:
            return _MAKERS[cls]
    raise NotImplementedError(
        f"no random inputs for {type(adapter).__name__}: none of its base classes "
        "has a maker in vllm_encoder_cg.samples.encoder_inputs"
    )


def _generator(adapter: EncoderAdapter, seed: int) -> torch.Generator:
    device = next(adapter.model.parameters()).device
    return torch.Generator(device=device).manual_seed(seed)


class PackedInputs:
    """Patches of all items as rows, one grid per item."""

    def images(
        self,
        adapter: PackedTowerAdapter,
        sizes: Sequence[ImageSize],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        return self._batch(adapter, "image", [(1, *size) for size in sizes], generator)

    def videos(
        self,
        adapter: PackedTowerAdapter,
        clips: Sequence[VideoSize],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        return self._batch(adapter, "video", clips, generator)

    def _batch(
        self,
        adapter: PackedTowerAdapter,
        modality: str,
        items: Sequence[VideoSize],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        vision = adapter.vllm_config.model_config.hf_config.vision_config
        merge = adapter.merge_size
        block = vision.patch_size * merge
        grids = [
            (
                adapter.temporal_patches(frames) if modality == "video" else 1,
                max(1, height // block) * merge,
                max(1, width // block) * merge,
            )
            for frames, width, height in items
        ]
        return adapter.random_kwargs(modality, grids, generator)


class TiledInputs:
    """Tiles as processors cut them: as many as cover the image, up to 4 by 4."""

    most_per_side = 4

    def images(
        self,
        adapter: TiledTowerAdapter,
        sizes: Sequence[ImageSize],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        side = min(kind.side for kind in adapter.kinds.values())

        def count(length: int) -> int:
            return min(self.most_per_side, -(-length // side))

        grids = [(count(width), count(height)) for width, height in sizes]
        return adapter.random_images(grids, generator)

    def videos(
        self,
        adapter: TiledTowerAdapter,
        clips: Sequence[VideoSize],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        return adapter.random_videos([clip[0] for clip in clips], generator)


class SoftTokenInputs:
    """Images and frames scaled to fill most of their soft tokens."""

    def images(
        self,
        adapter: Gemma4Adapter,
        sizes: Sequence[ImageSize],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        width = adapter.image_width()
        return adapter.random_images([fit_grid(*s, width) for s in sizes], generator)

    def videos(
        self,
        adapter: Gemma4Adapter,
        clips: Sequence[VideoSize],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        grids = [
            [fit_grid(width, height, adapter.frame_width)] * frames
            for frames, width, height in clips
        ]
        return adapter.random_videos(grids, generator)


class SlicedInputs:
    """An overview and, where the image is larger, up to 9 slices of its shape; a
    frame is not sliced."""

    most_slices = 9

    def images(
        self,
        adapter: MiniCPMVAdapter,
        sizes: Sequence[ImageSize],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        side = adapter.model.config.image_size
        items = [self._slices(size, side, adapter.patch_size) for size in sizes]
        return adapter.random_kwargs("image", items, generator)

    def videos(
        self,
        adapter: MiniCPMVAdapter,
        clips: Sequence[VideoSize],
        generator: torch.Generator,
    ) -> dict[str, Any]:
        most = (adapter.model.config.image_size // adapter.patch_size) ** 2
        items = [[fit_grid(w, h, most)] * frames for frames, w, h in clips]
        return adapter.random_kwargs("video", items, generator)

    def _slices(self, size: ImageSize, side: int, patch: int) -> list[TokenGrid]:
        width, height = size
        most = (side // patch) ** 2
        count = min(self.most_slices, -(-width * height // side**2))
        grids = [fit_grid(width, height, most)]
        if count > 1:
            rows, columns = fit_grid(width, height, count)
            cell = fit_grid(width / columns, height / rows, most)
            grids += [cell] * (rows * columns)
        return grids


_MAKERS: dict[type, InputMaker] = {
    PackedTowerAdapter: PackedInputs(),
    TiledTowerAdapter: TiledInputs(),
    Gemma4Adapter: SoftTokenInputs(),
    MiniCPMVAdapter: SlicedInputs(),
}
"""By adapter; one also serves the subclasses that have no nearer one."""
