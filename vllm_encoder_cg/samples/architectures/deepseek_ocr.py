# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoint of DeepSeek-OCR.

vLLM hard-codes both towers, so they have the released size (SAM-B and CLIP-L,
about 400 million weights) in the small checkpoint, too.
"""

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


def _config(vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    hidden = HIDDEN if small else 1280
    heads = HEADS if small else 10
    return {
        "model_type": "deepseek_vl_v2",
        "tile_tag": "2D",
        "global_view_pos": "head",
        "projector_config": {
            "model_type": "mlp_projector",
            "projector_type": "linear",
            "input_dim": 2048,
            "n_embed": hidden,
        },
        "vision_config": {"model_type": "vision", "image_size": 1024},
        "language_config": {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            # All zero: plain attention instead of MLA.
            "q_lora_rank": None,
            "kv_lora_rank": None,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 0,
            "v_head_dim": 0,
            "use_mla": False,
            "max_position_embeddings": 32768,
        },
    }


def _files(vision: Vision) -> dict[str, Json]:
    processor = {"processor_class": "DeepseekOCRProcessor"}
    return {"processor_config.json": processor, "preprocessor_config.json": processor}


SAMPLES = (
    SampleArchitecture(
        name="DeepseekOCRForCausalLM",
        modalities=("image",),
        special_tokens=("<image>",),
        make_config=_config,
        make_files=_files,
        image_placeholder="<image>",
        # Profiling with the largest image would take a CPU a minute.
        cpu_engine={"skip_mm_profiling": True},
    ),
)
