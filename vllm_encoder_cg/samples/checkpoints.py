# SPDX-License-Identifier: Apache-2.0
"""Writes small checkpoints, without weights, that vLLM can start.

::

    from pathlib import Path

    from vllm import LLM
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs, write_checkpoint

    if __name__ == "__main__":  # vLLM may start processes
        name = "Qwen3VLForConditionalGeneration"
        folder = write_checkpoint(name, Path("/tmp/qwen3-vl"))
        flag = {"cudagraph_mm_encoder": True}
        llm = LLM(model=str(folder), **engine_kwargs(name, compilation_config=flag))

The weights come from ``load_format="encoder_cg_random"``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from vllm_encoder_cg.integration.random_loader import LOAD_FORMAT
from vllm_encoder_cg.samples.architectures import ARCHITECTURES
from vllm_encoder_cg.samples.definition import (
    PAD,
    TURN_END,
    TURN_START,
    Json,
    SampleArchitecture,
    Vision,
)
from vllm_encoder_cg.samples.tokenizer import special_token_ids, write_tokenizer

__all__ = ["ARCHITECTURES", "engine_kwargs", "prompt", "write_checkpoint"]

_REMOTE_CODE = Path(__file__).parent / "remote_code"


def write_checkpoint(
    architecture: str, directory: Path, *, vision: Vision = "small"
) -> Path:
    """Write everything but weights of a checkpoint.

    Args:
        architecture: a key of ``ARCHITECTURES``.
        directory: the folder to write; made if missing, files are overwritten.
        vision: ``"small"`` runs on a CPU. ``"released"`` has the tower of the
            released checkpoint and a text model of the same width with few
            layers, for checks on a GPU.

    Returns:
        The folder.

    Raises:
        ValueError: the architecture or the vision size is unknown.
    """
    sample = _sample(architecture)
    if vision not in ("small", "released"):
        raise ValueError(f"vision must be 'small' or 'released', got {vision!r}.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)

    token_ids = special_token_ids(sample.special_tokens)
    generation = {
        "bos_token_id": token_ids[PAD],
        "eos_token_id": token_ids[TURN_END],
        "pad_token_id": token_ids[PAD],
    }
    config = {
        "architectures": [sample.vllm_architecture or sample.name],
        "dtype": "bfloat16",
        **generation,
        **sample.make_config(vision, token_ids),
    }
    # transformers would fill in the ids of the released vocabulary.
    for name in ("text_config", "language_config"):
        if name in config:
            config[name] = generation | config[name]
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation)
    for name, content in sample.make_files(vision).items():
        _write_json(directory / name, content)
    for name in sample.remote_code:
        shutil.copyfile(_REMOTE_CODE / name, directory / name)
    write_tokenizer(
        directory,
        sample.special_tokens,
        sample.image_placeholder,
        sample.video_placeholder,
        sample.tokenizer_options,
    )
    return directory


def engine_kwargs(architecture: str, **overrides: Any) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``, beside ``model``, for a sample checkpoint.

    Args:
        architecture: a key of ``ARCHITECTURES``.
        overrides: further arguments, which win; dictionaries are merged, so that
            ``compilation_config={"cudagraph_mm_encoder": True}`` keeps what the
            architecture sets there.

    Raises:
        ValueError: the architecture is unknown.
    """
    sample = _sample(architecture)
    kwargs: dict[str, Any] = {
        "load_format": LOAD_FORMAT,
        "max_model_len": 8192,
        "max_num_seqs": 8,
        "limit_mm_per_prompt": dict.fromkeys(sample.modalities, 4),
    }
    if sample.remote_code:
        kwargs["trust_remote_code"] = True
    layers = [sample.engine, overrides]
    if sample.cpu_engine and _vllm_runs_on_cpu():
        layers.insert(1, sample.cpu_engine)
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(kwargs.get(key), dict):
                value = kwargs[key] | value
            kwargs[key] = value
    return kwargs


def _vllm_runs_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def prompt(architecture: str, *, images: int = 0, videos: int = 0) -> str:
    """A prompt with placeholders for so many images, then so many videos.

    Raises:
        ValueError: the architecture is unknown, a count is negative, or videos
            are asked of an architecture without them.
    """
    sample = _sample(architecture)
    if images < 0 or videos < 0:
        raise ValueError(f"images={images} and videos={videos} must not be negative.")
    if videos and sample.video_placeholder is None:
        raise ValueError(f"{architecture} takes no videos, but videos={videos}.")
    media = sample.image_placeholder * images
    media += (sample.video_placeholder or "") * videos
    return f"{TURN_START}user\n{media}Describe this.{TURN_END}\n{TURN_START}assistant\n"


def _sample(architecture: str) -> SampleArchitecture:
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        raise ValueError(
            f"architecture {architecture!r} has no sample checkpoint; there are "
            f"{', '.join(sorted(ARCHITECTURES))}."
        ) from None


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
