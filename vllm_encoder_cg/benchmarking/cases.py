# SPDX-License-Identifier: Apache-2.0
"""The batches that are timed.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_encoder_cg.verification_cases import MediaBatch, images, parse_items

MIXED_SIZES = (
    (224, 224),
    (336, 448),
    (512, 512),
    (640, 480),
    (800, 600),
    (1024, 768),
    (300, 900),
    (1280, 720),
)

GROWTH_ITEMS = (1, 4, 16, 64)
GROWTH_TOKENS = (64, 256, 1024, 4096, 16384)


@dataclass(frozen=True)
class BenchCase:
    """One batch of a single modality."""

    name: str
    batch: MediaBatch


STANDARD_CASES = (
    BenchCase("1 x 224x224", images((224, 224))),
    BenchCase("1 x 336x336", images((336, 336))),
    BenchCase("1 x 512x512", images((512, 512))),
    BenchCase("1 x 640x480", images((640, 480))),
    BenchCase("1 x 1024x1024", images((1024, 1024))),
    BenchCase("1 x 1920x1080", images((1920, 1080))),
    BenchCase("1 x 2048x2048", images((2048, 2048))),
    BenchCase("4 x 336x336", images(*[(336, 336)] * 4)),
    BenchCase("20 x 336x336", images(*[(336, 336)] * 20)),
    BenchCase("8 mixed sizes", images(*MIXED_SIZES)),
    BenchCase("5 x 640x480", images(*[(640, 480)] * 5)),
)
"""Images at sizes from an icon to a screen, alone and together."""

SMALL_CASES = (
    BenchCase("1 x 64x64", images((64, 64))),
    BenchCase("1 x 224x224", images((224, 224))),
    BenchCase("4 x 112x112", images(*[(112, 112)] * 4)),
    BenchCase("3 mixed sizes", images((64, 64), (160, 96), (224, 320))),
)
"""For small towers, which a CPU runs in milliseconds."""


def parse_cases(texts: list[str]) -> tuple[BenchCase, ...]:
    """One case per text, in the form that ``verify --items`` takes.

    Raises:
        ValueError: an entry cannot be read, or a case mixes images and videos.
    """
    cases = []
    for text in texts:
        batches = parse_items(text).batches
        if len(batches) != 1:
            raise ValueError(
                f"items: got {text!r}; vLLM encodes images and videos in calls of "
                "their own, so give them as cases of their own"
            )
        cases.append(BenchCase(text, batches[0]))
    return tuple(cases)
