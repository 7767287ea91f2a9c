# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoint of ERNIE-4.5-VL."""

from __future__ import annotations

from vllm_encoder_cg.samples.definition import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB_SIZE,
    Json,
    SampleArchitecture,
    TokenIds,
    Vision,
)

TOKENS = (
    "<|IMAGE_START|>",
    "<|image@placeholder|>",
    "<|IMAGE_END|>",
    "<|VIDEO_START|>",
    "<|video@placeholder|>",
    "<|VIDEO_END|>",
    # What both placeholders become, once for each row of the encoder's output.
    "<|IMAGE_PLACEHOLDER|>",
)


def _config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    tower = {
        "depth": 2 if small else 32,
        "embed_dim": 64 if small else 1280,
        "hidden_size": 64 if small else 1280,
        "num_heads": 4 if small else 16,
        "mlp_ratio": 2 if small else 4,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "hidden_act": "quick_gelu",
    }
    return {
        "model_type": "ernie4_5_moe_vl",
        "auto_map": {"AutoConfig": "configuration_ernie_sample.SampleErnieConfig"},
        "tie_word_embeddings": False,
        "im_patch_id": ids["<|IMAGE_PLACEHOLDER|>"],
        "image_start_token_id": ids["<|IMAGE_START|>"],
        "image_end_token_id": ids["<|IMAGE_END|>"],
        "video_start_token_id": ids["<|VIDEO_START|>"],
        "video_end_token_id": ids["<|VIDEO_END|>"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN if small else 2560,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS if small else 20,
        "num_key_value_heads": KV_HEADS if small else 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "use_bias": False,
        "max_position_embeddings": 32768,
        # Of the rotary half, time takes freq_allocation, height and width the rest.
        "freq_allocation": 20,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500000.0,
            "mrope_section": [6, 6, 20] if small else [22, 22, 20],
        },
        # One list entry for text tokens, one for vision tokens.
        "moe_num_experts": [4, 4],
        "moe_intermediate_size": [64, 64],
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [1, 1],
        "moe_layer_interval": 1,
        "pixel_hidden_size": tower["hidden_size"],
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "use_temporal_conv": True,
        "vision_config": tower,
    }


def _files(vision: Vision) -> dict[str, Json]:
    return {
        "preprocessor_config.json": {
            "patch_size": 14,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "min_pixels": 3136,
            "max_pixels": 1048576 if vision == "small" else 4816896,
        },
        "processor_config.json": {
            "processor_class": "SampleErnieProcessor",
            "auto_map": {
                "AutoProcessor": "processing_ernie_sample.SampleErnieProcessor"
            },
        },
    }


SAMPLES = (
    SampleArchitecture(
        name="Ernie4_5_VLMoeForConditionalGeneration",
        modalities=("image", "video"),
        special_tokens=TOKENS,
        make_config=_config,
        make_files=_files,
        image_placeholder="<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
        video_placeholder="<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>",
        # The CPU form of its rotary embedding calls the native one with an argument
        # too many (vLLM 0.32 and 0.33); without the custom op the native one is
        # called directly.
        cpu_engine={"compilation_config": {"custom_ops": ["-rotary_embedding"]}},
        remote_code=("configuration_ernie_sample.py", "processing_ernie_sample.py"),
    ),
)
