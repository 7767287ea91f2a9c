# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoint of InternVL (InternViT with a Qwen2 text model)."""

from __future__ import annotations

from vllm_encoder_cg.samples.architectures.qwen2 import qwen2_text
from vllm_encoder_cg.samples.definition import (
    Json,
    SampleArchitecture,
    TokenIds,
    Vision,
)

# The text model's video token is what makes vLLM accept videos.
TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>", "<|video_pad|>")


def _config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    image_size = 112 if small else 448
    return {
        "model_type": "internvl_chat",
        "auto_map": {
            "AutoConfig": "configuration_internvl_sample.SampleInternVLConfig"
        },
        "tie_word_embeddings": False,
        "select_layer": -1,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "force_image_size": image_size,
        "dynamic_image_size": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 6 if small else 12,
        "use_thumbnail": True,
        "text_config": qwen2_text(vision, 3584, (28, 4))
        | {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "vision_config": {
            "hidden_size": 64 if small else 1024,
            "intermediate_size": 96 if small else 4096,
            "num_hidden_layers": 2 if small else 24,
            "num_attention_heads": 4 if small else 16,
            "num_channels": 3,
            "image_size": image_size,
            "patch_size": 14,
            "qkv_bias": True,
            "qk_normalization": False,
            "norm_type": "layer_norm",
            "layer_norm_eps": 1e-6,
            "hidden_act": "gelu",
            "initializer_factor": 1.0,
        },
    }


SAMPLES = (
    SampleArchitecture(
        name="InternVLChatModel",
        modalities=("image", "video"),
        special_tokens=TOKENS,
        make_config=_config,
        make_files=lambda vision: {},  # vLLM brings the processor
        image_placeholder="<image>",
        video_placeholder="<video>",
        remote_code=("configuration_internvl_sample.py",),
    ),
)
