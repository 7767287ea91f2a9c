# SPDX-License-Identifier: Apache-2.0
"""Encoders on several ranks against the model itself on one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.multi_gpu.setup import (
    DEEPSEEK,
    Encoder,
    built,
    capture,
    encode,
    write_encoder,
)
from vllm_encoder_cg.verification_cases import MediaBatch, default_cases, images

_WITH_DROPPED_GRAPHS = 10


@dataclass
class Correctness:
    """One encoder on all ranks."""

    encoder: str
    ranks: int
    mode: str
    """The one that vLLM came to; not every model has its encoder data parallel."""
    batches: int = 0
    error: float = 0.0
    """Largest relative norm of the difference, per item."""
    replayed: int = 0
    """Items encoded by graph, on any rank."""
    eager: int = 0
    tolerance: float = 0.0
    problems: list[str] = field(default_factory=list)


def check(
    encoders: list[Encoder], ranks: int, random_batches: int
) -> list[Correctness]:
    """Fixed and random batches, then some again with graphs missing on a rank.

    Args:
        encoders: alike but for their modes.
    """
    from vllm_encoder_cg.samples.rank_processes import run_on_ranks

    with tempfile.TemporaryDirectory(prefix="multi-gpu-") as name:
        checkpoint = write_encoder(encoders[0], ranks, Path(name))
        batches = make_batches(encoders[0], random_batches)
        run_on_ranks(write_references, 1, encoders[0], checkpoint, batches)
        of_ranks = run_on_ranks(check_on_rank, ranks, encoders, checkpoint, batches)
    return [_join(of_encoder) for of_encoder in zip(*of_ranks, strict=True)]


def _join(of_ranks: Sequence[Correctness]) -> Correctness:
    first, *others = of_ranks
    for other in others:
        first.error = max(first.error, other.error)
        first.problems += other.problems
        if first.mode == "data":
            first.replayed += other.replayed
            first.eager += other.eager
    return first


def make_batches(encoder: Encoder, random_batches: int) -> list[MediaBatch]:
    """What is easily wrong with several ranks, then random batches."""
    small = encoder.vision == "small"
    side = 256 if small else 1024
    tiles = encoder.architecture == DEEPSEEK
    modalities = ["image"] if tiles else ["image", "video"]
    large = (3 * side, 3 * side)
    fixed = [
        images((side // 2, side // 2)),
        images((side, side), *[(side // 8, side // 8)] * 6),
        images(*[(side // 3, side // 3)] * (3 if small else 20)),
        images((side // 2, side // 2), large, (side // 4, side // 2)),
        images(large),
    ]
    if not random_batches:
        return fixed
    cases = default_cases(
        modalities, 20, largest_side=2 * side, random_batches=random_batches
    )
    return [*fixed, *cases[-1].batches]


def make_inputs(adapter: Any, batch: MediaBatch, seed: int) -> dict[str, Any]:
    """The same on every rank."""
    from vllm_encoder_cg.samples.encoder_inputs import image_batch, video_batch

    if batch.modality == "video":
        clips = [(item.frames, item.width, item.height) for item in batch.items]
        return video_batch(adapter, clips, seed)
    return image_batch(adapter, [(i.width, i.height) for i in batch.items], seed)


def write_references(
    rank: int, ranks: int, encoder: Encoder, checkpoint: Path, batches: list[MediaBatch]
) -> None:
    """What the model makes of every batch on a single rank, as files."""
    import torch

    from vllm_encoder_cg.verification import eager_embeddings

    with built(encoder, ranks, checkpoint) as manager:
        for seed, batch in enumerate(batches):
            mm_kwargs = make_inputs(manager.adapter, batch, seed)
            embeddings = eager_embeddings(manager.model, mm_kwargs)
            torch.save([each.cpu() for each in embeddings], _file(checkpoint, seed))


def _file(checkpoint: Path, seed: int) -> Path:
    return checkpoint.parent / f"{seed}.pt"


def check_on_rank(
    rank: int,
    ranks: int,
    encoders: list[Encoder],
    checkpoint: Path,
    batches: list[MediaBatch],
) -> list[Correctness]:
    """This rank's outputs against the files, once per mode that vLLM comes to."""
    results: list[Correctness] = []
    for encoder in encoders:
        with built(encoder, ranks, checkpoint) as manager:
            multimodal = manager.vllm_config.model_config.multimodal_config
            mode = multimodal.mm_encoder_tp_mode
            if mode in [result.mode for result in results]:
                continue
            result = Correctness(str(encoder), ranks, mode)
            _check_batches(manager, rank, checkpoint, batches, result)
            results.append(result)
    return results


def _check_batches(
    manager: Any,
    rank: int,
    checkpoint: Path,
    batches: list[MediaBatch],
    result: Correctness,
) -> None:
    from vllm_encoder_cg.verification import TOLERANCE

    result.tolerance = TOLERANCE[manager.dtype]
    capture(manager)
    if not manager.is_captured():
        result.problems.append(f"no graphs: {manager.inactive_reason}")
    for seed, batch in enumerate(batches):
        _compare(manager, batch, seed, checkpoint, result)
    if result.ranks > 1 and result.mode == "data" and rank == result.ranks - 1:
        for key in list(manager._graphs.graphs)[::2]:
            manager._graphs.drop(key)
        manager._make_planner()
    for seed, batch in list(enumerate(batches))[:_WITH_DROPPED_GRAPHS]:
        _compare(manager, batch, seed, checkpoint, result)
    result.replayed = manager.stats.hits
    result.eager = manager.stats.misses.total()


def _compare(
    manager: Any, batch: MediaBatch, seed: int, checkpoint: Path, result: Correctness
) -> None:
    import torch

    from vllm_encoder_cg.startup.rounding import relative_norm

    outputs = encode(manager, make_inputs(manager.adapter, batch, seed))
    references = torch.load(_file(checkpoint, seed))
    result.batches += 1
    if len(outputs) != len(references):
        result.problems.append(f"{batch}: {len(outputs)} embeddings")
        return
    errors = [
        relative_norm(output, reference.to(output.device))
        for output, reference in zip(outputs, references, strict=True)
    ]
    result.error = max(result.error, *errors)
    if max(errors) > result.tolerance:
        result.problems.append(f"{batch}: differs by {max(errors):.2e}")
