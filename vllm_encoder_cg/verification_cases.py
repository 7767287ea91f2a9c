# SPDX-License-Identifier: Apache-2.0
"""The batches on which every adapter is compared with its model.

Sizes are in pixels and say nothing about a model; what a size comes to in
tokens is the model's affair.  Imports no torch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Modality = Literal["image", "video"]

FULL_SIDE = 2048
"""Longest side of the images of the cases at full scale."""

_MIN_SIDE = 32


@dataclass(frozen=True)
class MediaItem:
    """One image, or one video of at least 2 frames."""

    modality: Modality
    frames: int
    """1 for an image."""
    width: int
    height: int

    def __str__(self) -> str:
        size = f"{self.width}x{self.height}"
        return size if self.modality == "image" else f"video:{self.frames}x{size}"


@dataclass(frozen=True)
class MediaBatch:
    """The items of one call, all of one modality."""

    items: tuple[MediaItem, ...]

    @property
    def modality(self) -> Modality:
        return self.items[0].modality

    def __str__(self) -> str:
        counted = [(item, len(list(same))) for item, same in groupby(self.items)]
        return ", ".join(f"{item}*{n}" if n > 1 else str(item) for item, n in counted)


@dataclass(frozen=True)
class Case:
    """Calls in a row, each compared on its own."""

    name: str
    batches: tuple[MediaBatch, ...]
    poison: bool = False
    """Fill the captured buffers with NaN before every call."""
    repeat: int = 1
    """Calls per batch, with the same values."""

    def describe(self) -> str:
        """The items of a call, or how many calls there are."""
        if len(self.batches) > 4:
            items = sum(len(batch.items) for batch in self.batches)
            return f"{len(self.batches)} calls, {items} items"
        return "; ".join(map(str, self.batches))


def images(*sizes: tuple[int, int]) -> MediaBatch:
    """A call with images of (width, height)."""
    return MediaBatch(tuple(MediaItem("image", 1, w, h) for w, h in sizes))


def videos(*clips: tuple[int, int, int]) -> MediaBatch:
    """A call with videos of (frames, width, height)."""
    return MediaBatch(tuple(MediaItem("video", *clip) for clip in clips))


def parse_items(text: str) -> Case:
    """A case from ``"640x480,336x336*4,video:16x448x448"``.

    Neighbours of one modality make up one call.

    Raises:
        ValueError: an entry has another form, a size of 0, or a video of a
            single frame; the message names the entry.
    """
    items: list[MediaItem] = []
    for entry in text.split(","):
        match = re.fullmatch(
            r"(?:video:(?P<frames>\d+)x)?(?P<w>\d+)x(?P<h>\d+)(?:\*(?P<n>\d+))?",
            entry.strip(),
        )
        if match is None:
            raise ValueError(
                f"items: got {entry.strip()!r}; use WIDTHxHEIGHT or "
                "video:FRAMESxWIDTHxHEIGHT, with *COUNT behind it for several"
            )
        frames, width, height, count = (
            int(match[name]) if match[name] else 1 for name in ("frames", "w", "h", "n")
        )
        if not width or not height or not count or (match["frames"] and frames < 2):
            raise ValueError(
                f"items: got {entry.strip()!r}; sizes and counts are positive, and a "
                "video has at least 2 frames"
            )
        modality: Modality = "video" if match["frames"] else "image"
        items += [MediaItem(modality, frames, width, height)] * count
    batches = groupby(items, key=lambda item: item.modality)
    return Case("given", tuple(MediaBatch(tuple(group)) for _, group in batches))


def default_cases(
    modalities: Sequence[str],
    max_items: int,
    *,
    largest_side: int = FULL_SIDE,
    random_batches: int = 100,
    seed: int = 0,
) -> list[Case]:
    """The cases that every adapter has to pass.

    Args:
        modalities: of the model; without ``"video"`` there are no videos.
        max_items: the most items of one replay; one case has more.
        largest_side: scales all sizes; 2048 is full scale.
        random_batches: calls of the last case.
    """

    def side(full: int) -> int:
        return max(_MIN_SIDE, round(full * largest_side / FULL_SIDE))

    def pictures(*sizes: tuple[int, int]) -> MediaBatch:
        return images(*((side(w), side(h)) for w, h in sizes))

    def clips(*sizes: tuple[int, int, int]) -> MediaBatch:
        return videos(*((frames, side(w), side(h)) for frames, w, h in sizes))

    ladder = [224 + round(i * (FULL_SIDE - 224) / 19) for i in range(20)]
    mixed = pictures((640, 480), (336, 336), (1024, 768), (224, 672))
    cases = [
        Case("1 small image", (pictures((336, 336)),)),
        Case("1 large image", (pictures((FULL_SIDE, FULL_SIDE)),)),
        Case("2 equal images", (pictures(*[(448, 448)] * 2),)),
        Case("2 unlike images", (pictures((336, 672), (1024, 512)),)),
        Case("4 equal images", (pictures(*[(640, 480)] * 4),)),
        Case("4 unlike images", (mixed,)),
        Case("20 equal images", (pictures(*[(336, 336)] * 20),)),
        Case(
            "20 unlike images",
            (pictures(*((s, ladder[(7 * i) % 20]) for i, s in enumerate(ladder))),),
        ),
        Case("1 row, 1 column", (pictures((FULL_SIDE, 0), (0, FULL_SIDE)),)),
        Case("large among small", (pictures((FULL_SIDE, 1536), *[(224, 224)] * 5),)),
        Case("more than max items", (pictures(*[(64, 64)] * (max_items + 1)),)),
        Case("same pixels twice", (mixed,), repeat=2),
        Case("NaN in buffers", (pictures((FULL_SIDE, FULL_SIDE)), mixed), poison=True),
    ]
    if "video" in modalities:
        one, many = clips((8, 448, 448)), clips((64, 224, 224))
        cases += [
            Case("video of 2 frames", (clips((2, 448, 448)),)),
            Case("video of 16 frames", (clips((16, 448, 336)),)),
            Case("video of 64 frames", (many,)),
            Case("video of 64 tiny frames", (videos((64, 64, 64)),)),
            Case("4 unlike videos", (clips(*((2**i, 448, 336) for i in range(1, 5))),)),
            Case("image, video, image", (mixed, one, pictures((1024, 768)))),
            Case("video, image, video", (many, mixed, one)),
            Case("NaN, video", (many, one), poison=True),
        ]
    generator = random.Random(seed)
    if random_batches:
        batches = tuple(
            _random_batch(modalities, side(1024), max_items, generator)
            for _ in range(random_batches)
        )
        cases.append(Case(f"{random_batches} random batches", batches))
    return cases


def _random_batch(
    modalities: Sequence[str], largest: int, max_items: int, generator: random.Random
) -> MediaBatch:
    def length() -> int:
        # Small sizes as often as large ones.
        return round(_MIN_SIDE * (largest / _MIN_SIDE) ** generator.random())

    if generator.choice(list(modalities)) == "video":
        count = generator.randint(1, 3)
        clips = [(generator.randint(2, 16), length(), length()) for _ in range(count)]
        return videos(*clips)
    count = generator.choice([1, 1, 2, 3, 4, 8, min(20, max_items + 1)])
    return images(*((length(), length()) for _ in range(count)))
