# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoint of Kimi-VL."""

from __future__ import annotations

from vllm_encoder_cg.samples.definition import (
    HEADS,
    HIDDEN,
    VOCAB_SIZE,
    Json,
    SampleArchitecture,
    TokenIds,
    Vision,
)

TOKENS = ("<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")


def _config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    return {
        "model_type": "kimi_vl",
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "text_config": {
            "model_type": "deepseek_v2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN if small else 2048,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            # The dimensions that GPU kernels of this attention exist for.
            "qk_nope_head_dim": 64 if small else 128,
            "v_head_dim": 64 if small else 128,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 800000.0},
        },
        "vision_config": {
            "model_type": "moonvit",
            "patch_size": 14,
            "init_pos_emb_height": 8 if small else 64,
            "init_pos_emb_width": 8 if small else 64,
            "num_attention_heads": 4 if small else 16,
            "num_hidden_layers": 2 if small else 27,
            "hidden_size": 64 if small else 1152,
            "intermediate_size": 96 if small else 4304,
            "merge_kernel_size": [2, 2],
        },
    }


def _files(vision: Vision) -> dict[str, Json]:
    return {
        "preprocessor_config.json": {
            "patch_size": 14,
            "merge_kernel_size": [2, 2],
            "in_token_limit": 4096,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "processor_config.json": {
            "processor_class": "SampleKimiProcessor",
            "auto_map": {
                "AutoProcessor": "processing_kimi_vl_sample.SampleKimiProcessor"
            },
        },
    }


SAMPLES = (
    SampleArchitecture(
        name="KimiVLForConditionalGeneration",
        modalities=("image",),
        special_tokens=TOKENS,
        make_config=_config,
        make_files=_files,
        image_placeholder=(
            "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
        ),
        remote_code=("processing_kimi_vl_sample.py",),
    ),
)
