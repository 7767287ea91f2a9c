# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoints of Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from vllm_encoder_cg.samples.architectures.qwen_common import (
    qwen_sample,
    qwen_token_ids,
)
from vllm_encoder_cg.samples.definition import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB_SIZE,
    Json,
    TokenIds,
    Vision,
    pixel_limits,
)

RELEASED_HIDDEN = 3584


def qwen2_text(vision: Vision, hidden: int, released_heads: tuple[int, int]) -> Json:
    """A Qwen2 text model; its head size is always hidden size over heads.

    Args:
        vision: "small" takes the sample sizes, whatever the other arguments say.
        hidden: the hidden size with a released tower.
        released_heads: the heads and key-value heads with a released tower.
    """
    small = vision == "small"
    heads, kv_heads = (HEADS, KV_HEADS) if small else released_heads
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN if small else hidden,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }


def _text(vision: Vision) -> Json:
    section = [12, 10, 10] if vision == "small" else [16, 24, 24]
    return qwen2_text(vision, RELEASED_HIDDEN, (28, 4)) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": section,
        }
    }


def _qwen2_vl_config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    return {
        "model_type": "qwen2_vl",
        "tie_word_embeddings": False,
        **qwen_token_ids(ids),
        "text_config": _text(vision) | {"model_type": "qwen2_vl_text"},
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 2 if small else 32,
            "embed_dim": 64 if small else 1280,
            "hidden_size": HIDDEN if small else RELEASED_HIDDEN,
            "num_heads": 4 if small else 16,
            "mlp_ratio": 2 if small else 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "hidden_act": "quick_gelu",
        },
    }


def _qwen2_5_vl_config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    return {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        **qwen_token_ids(ids),
        "text_config": _text(vision) | {"model_type": "qwen2_5_vl_text"},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 3 if small else 32,
            "hidden_size": 64 if small else 1280,
            "intermediate_size": 96 if small else 3420,
            "num_heads": 4 if small else 16,
            "out_hidden_size": HIDDEN if small else RELEASED_HIDDEN,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            # The others attend inside windows.
            "fullatt_block_indexes": [2] if small else [7, 15, 23, 31],
            "tokens_per_second": 2,
            "hidden_act": "silu",
        },
    }


def _qwen2_vl_files(vision: Vision, processor: str) -> dict[str, Json]:
    common = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "processor_class": processor,
        "size": pixel_limits(vision, 3136, 12845056),
    }
    return {
        "preprocessor_config.json": common
        | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": common
        | {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "cap_pixels_per_frame": False,
        },
    }


SAMPLES = (
    qwen_sample(
        "Qwen2VLForConditionalGeneration",
        _qwen2_vl_config,
        lambda vision: _qwen2_vl_files(vision, "Qwen2VLProcessor"),
    ),
    qwen_sample(
        "Qwen2_5_VLForConditionalGeneration",
        _qwen2_5_vl_config,
        lambda vision: _qwen2_vl_files(vision, "Qwen2_5_VLProcessor"),
    ),
)
