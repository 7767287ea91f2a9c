# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoint of GLM-4.1V."""

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

TOKENS = (
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|video|>",
)


def _config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    hidden = HIDDEN if small else 4096
    return {
        "model_type": "glm4v",
        "tie_word_embeddings": False,
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"],
        "text_config": {
            "model_type": "glm4v_text",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [6, 5, 5],
            },
        },
        "vision_config": {
            "model_type": "glm4v",
            "depth": 2 if small else 24,
            "hidden_size": 64 if small else 1536,
            "num_heads": 4 if small else 12,
            # The width of the merger; a block's MLP is out_hidden_size wide.
            "intermediate_size": 96 if small else 13696,
            "out_hidden_size": hidden,
            "image_size": 56 if small else 336,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "hidden_act": "silu",
        },
    }


def _files(vision: Vision) -> dict[str, Json]:
    common = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "processor_class": "Glm4vProcessor",
    }
    return {
        "preprocessor_config.json": common
        | {
            "image_processor_type": "Glm4vImageProcessorFast",
            "size": pixel_limits(vision, 12544, 9633792),
        },
        "video_preprocessor_config.json": common
        | {
            "video_processor_type": "Glm4vVideoProcessor",
            "size": pixel_limits(vision, 12544, 47040000),
        },
    }


SAMPLES = (
    SampleArchitecture(
        name="Glm4vForConditionalGeneration",
        modalities=("image", "video"),
        special_tokens=TOKENS,
        make_config=_config,
        make_files=_files,
        image_placeholder="<|begin_of_image|><|image|><|end_of_image|>",
        video_placeholder="<|begin_of_video|><|video|><|end_of_video|>",
        # vLLM takes one video of this model in a prompt.
        engine={"limit_mm_per_prompt": {"image": 4, "video": 1}},
    ),
)
