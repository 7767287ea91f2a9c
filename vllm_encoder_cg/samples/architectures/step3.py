# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoint of Step3-VL."""

from __future__ import annotations

from vllm_encoder_cg.samples.definition import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    VOCAB_SIZE,
    Json,
    SampleArchitecture,
    TokenIds,
    Vision,
)

TOKENS = (
    "<im_start>",
    "<im_patch>",
    "<im_end>",
    "<patch_start>",
    "<patch_end>",
    "<patch_newline>",
)


def _config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    return {
        "model_type": "step3_vl",
        "image_token_id": ids["<im_patch>"],
        "understand_projector_stride": 2,
        "projector_bias": False,
        "text_config": {
            "model_type": "step3_text",
            "architectures": ["Step3TextForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN if small else 7168,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_attention_groups": 1,
            "head_dim": HEAD_SIZE,
            "share_q_dim": 128,
            "share_expert_dim": 64,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 64,
            # The layers with experts, as text; a list is not understood.
            "moe_layers_enum": "1",
            "max_position_embedding": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "vision_config": {
            "model_type": "step3_vision_encoder",
            "hidden_size": 64 if small else 1792,
            "intermediate_size": 96 if small else 15360,
            "output_hidden_size": 64 if small else 4096,
            "num_hidden_layers": 2 if small else 63,
            "num_attention_heads": 4 if small else 16,
            # The processor always makes images of 728 and tiles of 504 pixels.
            "image_size": 728,
            "patch_size": 14,
        },
    }


SAMPLES = (
    SampleArchitecture(
        name="Step3VLForConditionalGeneration",
        modalities=("image",),
        special_tokens=TOKENS,
        make_config=_config,
        make_files=lambda vision: {},  # vLLM brings the processor
        image_placeholder="<im_patch>",
    ),
)
