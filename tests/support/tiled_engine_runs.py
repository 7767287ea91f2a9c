# SPDX-License-Identifier: Apache-2.0
"""``engine_runs`` with images of sizes that tiled towers cut, and with a
DeepSeek-OCR whose towers a CPU runs in a second."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.support import engine_runs
from tests.support.small_towers import small_deepseek_ocr

WHOLE, *CUT = (300, 200), (900, 500), (400, 1300)
"""Sizes at which no model cuts, and at which Step3-VL and DeepSeek-OCR do."""


def prompts(architecture: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Text and media by name."""
    from vllm_encoder_cg.samples.checkpoints import ARCHITECTURES, prompt
    from vllm_encoder_cg.samples.media import make_video, random_image

    pictures = [
        random_image(*size, seed) for seed, size in enumerate([WHOLE, CUT[0], CUT[1]])
    ]
    one, three = prompt(architecture, images=1), prompt(architecture, images=3)
    result = {
        "whole": (one, {"image": pictures[:1]}),
        "cut": (one, {"image": pictures[1:2]}),
        "three images": (three, {"image": pictures}),
    }
    if "video" in ARCHITECTURES[architecture].modalities:
        media = {"image": pictures[:1], "video": [make_video(6, 84, 112, seed=3)]}
        text = prompt(architecture, images=1, videos=1)
        result["image and video"] = text, media
    return result


if __name__ == "__main__":
    with mock.patch.object(engine_runs, "prompts", prompts), small_deepseek_ocr():
        engine_runs.main()
