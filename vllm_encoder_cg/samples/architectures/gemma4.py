# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoint of Gemma 4 (without its audio tower)."""

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
)

NAMED_TOKENS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    # The processor asks for these, audio or not.
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
TOKENS = ("<bos>", *NAMED_TOKENS.values(), "<|video|>")


def _patch_size(vision: Vision) -> int:
    return 4 if vision == "small" else 16


def _config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    return {
        "model_type": "gemma4",
        "bos_token_id": ids["<bos>"],
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "boa_token_id": ids["<|audio>"],
        "eoa_token_index": ids["<audio|>"],
        "audio_token_id": ids["<|audio|>"],
        "audio_config": None,
        # The released model ties them; random weights would then repeat a token.
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "gemma4_text",
            "tie_word_embeddings": False,
            "vocab_size": VOCAB_SIZE,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 0,
            "hidden_size": HIDDEN if small else 1536,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "global_head_dim": HEAD_SIZE,
            "num_kv_shared_layers": 0,
            "sliding_window": 1024,
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": 32768,
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 64 if small else 768,
            "intermediate_size": 128 if small else 3072,
            "num_hidden_layers": 2 if small else 16,
            "num_attention_heads": 4 if small else 12,
            "num_key_value_heads": 4 if small else 12,
            "head_dim": 16 if small else 64,
            "patch_size": _patch_size(vision),
            "pooling_kernel_size": 3,
            "position_embedding_size": 1024 if small else 10240,
            "default_output_length": 280,
            "standardize": True,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        },
    }


def _files(vision: Vision) -> dict[str, Json]:
    patches = {"patch_size": _patch_size(vision), "pooling_kernel_size": 3}
    return {
        "processor_config.json": {
            "processor_class": "Gemma4Processor",
            "image_seq_length": 280,
            "image_processor": patches
            | {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 280},
            "video_processor": patches
            | {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70},
            "feature_extractor": {
                "feature_extractor_type": "Gemma4AudioFeatureExtractor"
            },
        },
    }


SAMPLES = (
    SampleArchitecture(
        name="Gemma4ForConditionalGeneration",
        modalities=("image", "video"),
        special_tokens=TOKENS,
        make_config=_config,
        make_files=_files,
        image_placeholder="<|image|>",
        video_placeholder="<|video|>",
        tokenizer_options={
            "bos_token": "<bos>",
            "extra_special_tokens": NAMED_TOKENS,
        },
    ),
)
