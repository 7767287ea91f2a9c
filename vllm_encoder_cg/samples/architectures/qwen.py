# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoints of the Qwen-VL models."""

from __future__ import annotations

from vllm_encoder_cg.samples.definition import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB_SIZE,
    Json,
    SampleArchitecture,
    TokenIds,
    Vision,
    pixel_limits,
)

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def _token_ids(ids: TokenIds) -> Json:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _text(hidden: int, layers: int) -> Json:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


def _tower(vision: Vision, out_hidden: int, deepstack: bool) -> Json:
    """The tower that Qwen3-VL and Qwen3.5 share."""
    small = vision == "small"
    levels = [0, 1] if small else [8, 16, 24]
    return {
        "depth": 3 if small else 27,
        "hidden_size": 64 if small else 1152,
        "intermediate_size": 96 if small else 4304,
        "num_heads": 4 if small else 16,
        "out_hidden_size": out_hidden,
        "num_position_embeddings": 64 if small else 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": levels if deepstack else [],
        "hidden_act": "gelu_pytorch_tanh",
    }


def _qwen3_vl_config(vision: Vision, ids: TokenIds) -> Json:
    hidden = HIDDEN if vision == "small" else 4096
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    }
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        **_token_ids(ids),
        # A layer for each deepstack level, and one more.
        "text_config": _text(hidden, layers=4)
        | {"model_type": "qwen3_vl_text", "rope_parameters": rope},
        "vision_config": _tower(vision, hidden, deepstack=True)
        | {"model_type": "qwen3_vl"},
    }


def _qwen3_vl_files(vision: Vision) -> dict[str, Json]:
    common = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    return {
        "preprocessor_config.json": common
        | {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": pixel_limits(vision, 65536, 16777216),
        },
        "video_preprocessor_config.json": common
        | {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": pixel_limits(vision, 4096, 25165824),
            "cap_pixels_per_frame": False,
        },
    }


SAMPLES = (
    SampleArchitecture(
        name="Qwen3VLForConditionalGeneration",
        modalities=("image", "video"),
        special_tokens=TOKENS,
        make_config=_qwen3_vl_config,
        make_files=_qwen3_vl_files,
        image_placeholder=IMAGE,
        video_placeholder=VIDEO,
    ),
)
