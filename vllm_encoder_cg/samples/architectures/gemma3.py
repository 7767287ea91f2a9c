# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoint of Gemma 3."""

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
    "<bos>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    # vLLM merges line breaks around an image as the released tokenizer does.
    "\n",
    "\n\n",
    "\n\n\n",
    "\n\n\n\n",
)
NAMED_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def _tokens_per_image(vision: Vision) -> int:
    return 16 if vision == "small" else 256


def _image_size(vision: Vision) -> int:
    return 112 if vision == "small" else 896


def _config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    return {
        "model_type": "gemma3",
        "bos_token_id": ids["<bos>"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        # The released model ties them; random weights would then repeat a token.
        "tie_word_embeddings": False,
        "mm_tokens_per_image": _tokens_per_image(vision),
        "text_config": {
            "model_type": "gemma3_text",
            "tie_word_embeddings": False,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN if small else 2560,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "query_pre_attn_scalar": HEAD_SIZE,
            "sliding_window": 1024,
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": 32768,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64 if small else 1152,
            "intermediate_size": 96 if small else 4304,
            "num_hidden_layers": 2 if small else 27,
            "num_attention_heads": 4 if small else 16,
            "image_size": _image_size(vision),
            "patch_size": 14,
            "vision_use_head": False,
        },
    }


def _files(vision: Vision) -> dict[str, Json]:
    side = _image_size(vision)
    return {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessorFast",
            "processor_class": "Gemma3Processor",
            "size": {"height": side, "width": side},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "do_pan_and_scan": None,
        },
        "processor_config.json": {
            "processor_class": "Gemma3Processor",
            "image_seq_length": _tokens_per_image(vision),
        },
    }


SAMPLES = (
    SampleArchitecture(
        name="Gemma3ForConditionalGeneration",
        modalities=("image",),
        special_tokens=TOKENS,
        make_config=_config,
        make_files=_files,
        image_placeholder="<start_of_image>",
        tokenizer_options={
            "bos_token": "<bos>",
            "extra_special_tokens": NAMED_TOKENS,
        },
    ),
)
