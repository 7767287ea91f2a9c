# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoint of Llama 4."""

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

TOKENS = (
    "<|image_start|>",
    "<|image_end|>",
    "<|image|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)


def _image_size(vision: Vision) -> int:
    return 56 if vision == "small" else 336


def _config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    hidden = HIDDEN if small else 5120
    tower = 64 if small else 1408
    adapter = 64 if small else 4096
    return {
        "model_type": "llama4",
        "tie_word_embeddings": False,
        "boi_token_index": ids["<|image_start|>"],
        "eoi_token_index": ids["<|image_end|>"],
        "image_token_index": ids["<|patch|>"],
        "text_config": {
            "model_type": "llama4_text",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden,
            "intermediate_size": 64,
            "intermediate_size_mlp": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": tower,
            # Four shuffled patches side by side, as the released model has it.
            "intermediate_size": tower * 4,
            "num_hidden_layers": 2 if small else 34,
            "num_attention_heads": 4 if small else 16,
            "image_size": _image_size(vision),
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": adapter,
            "projector_output_dim": adapter,
            "vision_output_dim": adapter,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _files(vision: Vision) -> dict[str, Json]:
    side = _image_size(vision)
    return {
        "preprocessor_config.json": {
            "image_processor_type": "Llama4ImageProcessorFast",
            "processor_class": "Llama4Processor",
            "size": {"height": side, "width": side},
            "max_patches": 16,
            "resize_to_max_canvas": False,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "processor_config.json": {
            "processor_class": "Llama4Processor",
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
        },
    }


SAMPLES = (
    SampleArchitecture(
        name="Llama4ForConditionalGeneration",
        modalities=("image",),
        special_tokens=TOKENS,
        make_config=_config,
        make_files=_files,
        image_placeholder="<|image|>",
    ),
)
