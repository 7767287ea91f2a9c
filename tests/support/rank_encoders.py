# SPDX-License-Identifier: Apache-2.0
"""Encoders of vLLM on the ranks of a tensor-parallel group, and on one alone.

The functions run in processes of their own (``rank_processes.py``), all encoders of
one run in one process, and return what the tests look at.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.support.fused import fused
from tests.support.rank_outcomes import Outcome, Rank
from tests.support.small_towers import small_deepseek_ocr
from vllm_encoder_cg.verification_cases import MediaBatch, images, videos

if TYPE_CHECKING:
    from vllm_encoder_cg.manager import EncoderCudaGraphManager

QWEN3 = "Qwen3VLForConditionalGeneration"
INTERNVL = "InternVLChatModel"
STEP3 = "Step3VLForConditionalGeneration"
DEEPSEEK = "DeepseekOCRForCausalLM"

MAX_TOKENS = {QWEN3: 256, INTERNVL: 256, STEP3: 512, DEEPSEEK: 600}

BATCHES: dict[str, dict[str, MediaBatch]] = {
    QWEN3: {
        "one item": images((128, 128)),
        "two items": images((128, 96), (64, 160)),
        "five items": images(*((32 * i, 64) for i in range(1, 6))),
        "one huge, many small": images((480, 480), *[(64, 64)] * 6),
        "more than max items": images(*[(64, 64)] * 20),
        "videos": videos((4, 64, 64), (8, 64, 96), (2, 128, 128)),
        "above every budget": images((64, 64), (640, 640), (64, 96)),
        "eagerly only": images((640, 640)),
    },
    INTERNVL: {
        "one item": images((112, 112)),
        "unlike items": images((448, 336), (112, 112), (224, 336), (112, 112)),
        "videos": videos((3, 112, 112), (7, 112, 112)),
        "above every budget": videos((20, 112, 112), (2, 112, 112)),
    },
    STEP3: {
        "one item": images((504, 504)),
        "whole and cut": images((1008, 504), (504, 504), (504, 1008)),
        "above every budget": images((504, 504), (2016, 1008)),
    },
    DEEPSEEK: {
        "one item": images((640, 640)),
        "whole and cut": images((1280, 640), (640, 640)),
        "above every budget": images((640, 640), (2560, 1280)),
    },
}
"""By architecture; the sizes suit ``MAX_TOKENS``."""


def write_references(rank: int, size: int, folder: str) -> None:
    """A checkpoint of every architecture, and as ``<architecture>.pt`` what the
    model makes of its batches on a single rank."""
    from vllm_encoder_cg.samples.checkpoints import write_checkpoint
    from vllm_encoder_cg.samples.encoder_inputs import media_batch
    from vllm_encoder_cg.verification import eager_embeddings

    gc.freeze()  # vLLM's modules
    for architecture, batches in BATCHES.items():
        checkpoint = Path(folder) / architecture
        write_checkpoint(architecture, checkpoint)
        with built(checkpoint, size, "weights") as manager:
            given = {}
            for seed, (name, batch) in enumerate(batches.items()):
                mm_kwargs = media_batch(manager.adapter, batch, seed)
                given[name] = (mm_kwargs, eager_embeddings(manager.model, mm_kwargs))
        torch.save(given, Path(folder) / f"{architecture}.pt")


def encode_on_rank(
    rank: int, size: int, folder: str, encoders: list[tuple[str, str]]
) -> dict[tuple[str, str, str], Outcome | bool]:
    """Every batch of every (architecture, mode), against ``write_references``."""
    outcomes: dict[tuple[str, str, str], Outcome | bool] = {}
    gc.freeze()  # vLLM's modules
    for architecture, mode in encoders:
        batches = torch.load(Path(folder) / f"{architecture}.pt", weights_only=False)
        with built(Path(folder) / architecture, size, mode) as manager:
            manager.capture()
            model = manager.model
            on_rank = Rank(manager, lambda kwargs: model.embed_multimodal(**kwargs))  # noqa: B023
            for name, (mm_kwargs, references) in batches.items():
                outcomes[architecture, mode, name] = on_rank.run(mm_kwargs, references)
            outcomes[architecture, mode, "changed"] = on_rank.kept_outputs_changed()
            if manager.adapter.fusion_refusal() is None:
                given = batches["videos"]
                with fused(manager.adapter):
                    outcomes[architecture, mode, "fused"] = on_rank.run(*given)
            if architecture == QWEN3:
                embeds = {"image_embeds": torch.zeros(4, 8)}
                given = on_rank.manager.execute(
                    embeds | {"image_grid_thw": torch.tensor([[1, 4, 4]])}
                )
                outcomes[architecture, mode, "embeddings taken"] = given is not None
        gc.collect()
    return outcomes


@contextmanager
def built(checkpoint: Path, size: int, mode: str) -> Iterator[EncoderCudaGraphManager]:
    """A small encoder of vLLM on this rank, not captured yet."""
    from vllm.config import set_current_vllm_config

    from vllm_encoder_cg.manager import EncoderCudaGraphManager
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs
    from vllm_encoder_cg.samples.model_builder import build_model, make_vllm_config

    engine_args = engine_kwargs(checkpoint.name)
    del engine_args["max_model_len"], engine_args["limit_mm_per_prompt"]
    vllm_config = make_vllm_config(
        **engine_args | {"dtype": "float32"},
        model=checkpoint,
        max_tokens=MAX_TOKENS[checkpoint.name],
        settings={"max_graphs": 6, "cost_model": False},
        tensor_parallel_size=size,
        mm_encoder_tp_mode=mode,
    )
    with small_deepseek_ocr(), set_current_vllm_config(vllm_config):
        yield EncoderCudaGraphManager(
            vllm_config, torch.device("cpu"), torch.float32, build_model(vllm_config)
        )
