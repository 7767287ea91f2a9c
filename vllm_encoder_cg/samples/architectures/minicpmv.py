# SPDX-License-Identifier: Apache-2.0
"""Sample checkpoints of MiniCPM-V 2.5, 2.6, 4.0 and 4.5."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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
    "<unk>",  # one for each row of the encoder's output
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    # The processor counts these; no prompt has them.
    "<im_start>",
    "<im_end>",
)


@dataclass(frozen=True)
class _Version:
    """What distinguishes a version; sizes are those of the released checkpoint."""

    name: str
    version: str
    queries: int
    hidden: int
    heads: int
    kv_heads: int
    takes_video: bool


VERSIONS = (
    _Version("MiniCPMV2_5", "2.5", 96, 4096, 32, 8, takes_video=False),
    _Version("MiniCPMV2_6", "2.6", 64, 3584, 28, 4, takes_video=True),
    _Version("MiniCPMV4_0", "4.0", 64, 2560, 32, 2, takes_video=True),
    _Version("MiniCPMV4_5", "4.5", 64, 4096, 32, 8, takes_video=True),
)


def _queries(version: _Version, vision: Vision) -> int:
    return 8 if vision == "small" else version.queries


def _config(version: _Version, vision: Vision, ids: TokenIds) -> Json:
    small = vision == "small"
    return {
        "model_type": "minicpmv",
        "auto_map": {
            "AutoConfig": "configuration_minicpmv_sample.SampleMiniCPMVConfig"
        },
        "version": version.version,
        "query_num": _queries(version, vision),
        "image_size": 112 if small else 448,
        "max_slice_num": 9,
        "drop_vision_last_layer": False,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
        # The resampler has heads of 128, so this is a multiple of 128.
        "hidden_size": HIDDEN if small else version.hidden,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS if small else version.heads,
        "num_key_value_heads": KV_HEADS if small else version.kv_heads,
        "head_dim": HEAD_SIZE if small else version.hidden // version.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64 if small else 1152,
            "intermediate_size": 96 if small else 4304,
            "num_hidden_layers": 2 if small else 27,
            "num_attention_heads": 4 if small else 16,
            # 70 x 70 positions, to which a slice's grid is scaled.
            "image_size": 980,
            "patch_size": 14,
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def _files(version: _Version, vision: Vision) -> dict[str, Json]:
    return {
        "preprocessor_config.json": {
            "image_processor_type": "SampleMiniCPMVImageProcessor",
            "processor_class": "MiniCPMVProcessor",  # vLLM brings it
            "auto_map": {
                "AutoImageProcessor": (
                    "image_processing_minicpmv_sample.SampleMiniCPMVImageProcessor"
                )
            },
            "max_slice_nums": 9,
            "scale_resolution": 112 if vision == "small" else 448,
            "patch_size": 14,
            "image_feature_size": _queries(version, vision),
            "use_image_id": version.version != "2.5",
        }
    }


def _sample(version: _Version) -> SampleArchitecture:
    return SampleArchitecture(
        name=version.name,
        vllm_architecture="MiniCPMV",
        modalities=("image", "video") if version.takes_video else ("image",),
        special_tokens=TOKENS,
        make_config=partial(_config, version),
        make_files=partial(_files, version),
        image_placeholder="(<image>./</image>)",
        video_placeholder="(<video>./</video>)" if version.takes_video else None,
        tokenizer_options={"unk_token": "<unk>"},
        remote_code=(
            "configuration_minicpmv_sample.py",
            "image_processing_minicpmv_sample.py",
        ),
    )


SAMPLES = tuple(_sample(version) for version in VERSIONS)
