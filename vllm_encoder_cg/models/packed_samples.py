# SPDX-License-Identifier: Apache-2.0
"""Sample input of packed towers, for warm-up, self-check and measurement."""

from __future__ import annotations

import torch

from vllm_encoder_cg.definitions import GraphCapacity
from vllm_encoder_cg.models.packed_layout import Grid

_MAX_SEQUENCE_TOKENS = 1024


def sample_grids(
    capacity: GraphCapacity, merge_size: int, seed: int, videos: bool
) -> list[Grid]:
    """Grids of several unlike items that fill most of a capacity.

    Args:
        videos: whether every third seed gives videos of two frames.
    """
    # Merged blocks: as many as tokens, unless the model merges frames too.
    blocks_left = total = capacity.extra["rows"] // merge_size**2
    items_left = capacity.items
    sequences_left = capacity.extra["sequences"]
    frames = 2 if videos and seed % 3 == 1 and min(total, sequences_left) > 1 else 1
    grids: list[Grid] = []
    share, aspect = 0.45, 0.6 + 0.1 * (seed % 5)
    while blocks_left >= frames and items_left > 0 and sequences_left >= frames:
        last = items_left == 1 or len(grids) >= 3
        blocks = blocks_left if last else max(1, int(blocks_left * share))
        blocks = max(1, min(blocks, _MAX_SEQUENCE_TOKENS) // frames)
        height = max(1, int((blocks * aspect) ** 0.5))
        width = max(1, blocks // height)
        grids.append((frames, height * merge_size, width * merge_size))
        blocks_left -= frames * height * width
        sequences_left -= frames
        items_left -= 1
        if len(grids) >= 4 and blocks_left < total // 16:
            break
    return grids


def uniform_grids(capacity: GraphCapacity, merge_size: int) -> list[Grid]:
    """Grids of as many equal sequences of about 64 tokens as fill a capacity."""
    blocks = capacity.extra["rows"] // merge_size**2
    sequences = min(capacity.extra["sequences"], max(1, blocks // 64))
    side = max(1, int((blocks / sequences) ** 0.5))
    width = max(1, blocks // sequences // side)
    frames, more = divmod(sequences, min(capacity.items, sequences))
    items = (sequences - more) // frames
    return [(frames, side * merge_size, width * merge_size)] * items


def random_rows(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Uniform bytes for uint8, else standard normal: the scale that processors
    normalise pixels to."""
    device = generator.device
    if dtype == torch.uint8:
        return torch.randint(
            0, 256, shape, dtype=dtype, device=device, generator=generator
        )
    return torch.randn(shape, device=device, generator=generator).to(dtype)
