# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoints of Qwen3-VL, Qwen3.5 and Qwen3.5-MoE."""

from __future__ import annotations

from functools import partial

from vllm_encoder_cg.samples.architectures.qwen_common import (
    qwen_sample,
    qwen_token_ids,
)
from vllm_encoder_cg.samples.definition import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB_SIZE,
    Json,
    TokenIds,
    Vision,
    pixel_limits,
)


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
        **qwen_token_ids(ids),
        # A layer for each deepstack level, and one more.
        "text_config": _text(hidden, layers=4)
        | {"model_type": "qwen3_vl_text", "rope_parameters": rope},
        "vision_config": _tower(vision, hidden, deepstack=True)
        | {"model_type": "qwen3_vl"},
    }


def _qwen3_5_config(moe: bool, vision: Vision, ids: TokenIds) -> Json:
    # In bfloat16 alone on a CPU: its linear attention has no float32 kernel there.
    model_type = "qwen3_5_moe" if moe else "qwen3_5"
    hidden = HIDDEN if vision == "small" else (2048 if moe else 5120)
    text = _text(hidden, layers=3) | {
        "model_type": f"{model_type}_text",
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    if moe:
        text |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        }
    return {
        "model_type": model_type,
        "tie_word_embeddings": False,
        **qwen_token_ids(ids),
        "text_config": text,
        "vision_config": _tower(vision, hidden, deepstack=False)
        | {"model_type": model_type},
    }


def _files(vision: Vision) -> dict[str, Json]:
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
    qwen_sample("Qwen3VLForConditionalGeneration", _qwen3_vl_config, _files),
    qwen_sample(
        "Qwen3_5ForConditionalGeneration",
        partial(_qwen3_5_config, False),
        _files,
    ),
    qwen_sample(
        "Qwen3_5MoeForConditionalGeneration",
        partial(_qwen3_5_config, True),
        _files,
    ),
)
