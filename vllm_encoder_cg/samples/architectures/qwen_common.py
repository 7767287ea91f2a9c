# SPDX-License-Identifier: Apache-2.0
"""Prompt tokens that all Qwen-VL models share."""

from __future__ import annotations

from collections.abc import Callable

from vllm_encoder_cg.samples.definition import (
    Json,
    SampleArchitecture,
    TokenIds,
    Vision,
)

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def qwen_token_ids(ids: TokenIds) -> Json:
    """The entries of ``config.json`` that name the vision tokens."""
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def qwen_sample(
    name: str,
    make_config: Callable[[Vision, TokenIds], Json],
    make_files: Callable[[Vision], dict[str, Json]],
) -> SampleArchitecture:
    """A sample with Qwen's vision tokens, for images and videos."""
    return SampleArchitecture(
        name=name,
        modalities=("image", "video"),
        special_tokens=TOKENS,
        make_config=make_config,
        make_files=make_files,
        image_placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        video_placeholder="<|vision_start|><|video_pad|><|vision_end|>",
    )
