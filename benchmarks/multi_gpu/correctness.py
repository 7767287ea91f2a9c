# SPDX-License-Identifier: Apache-2.0
"""Encoders on several ranks against the model itself on one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.multi_gpu.on_ranks import run_encoders
from benchmarks.multi_gpu.results import Results, TimeLimit
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
_WITH_FAILURES = 5


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
    encoders: list[Encoder],
    ranks: int,
    random_batches: int,
    results: Results,
    limit: TimeLimit,
) -> None:
    """Fixed and random batches, then some again with graphs missing on a rank, and
    one that raises on a rank; a row per mode.

    Args:
        encoders: alike but for their modes.

    Raises:
        RankError: the model could not be run on a single rank.
    """
    from vllm_encoder_cg.samples.rank_processes import run_on_ranks

    with tempfile.TemporaryDirectory(prefix="multi-gpu-") as name:
        checkpoint = write_encoder(encoders[0], ranks, Path(name))
        batches = make_batches(encoders[0], random_batches)
        run_on_ranks(
            write_references,
            1,
            encoders[0],
            checkpoint,
            batches,
            timeout_s=limit.of_step,
        )
        run_encoders(
            "correctness",
            check_on_rank,
            ranks,
            encoders,
            results,
            limit,
            checkpoint,
            batches,
        )


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
    # 20 images, as the reference design's workload has; any of DeepSeek-OCR's becomes
    # one of 1024x1024, of which a CPU can take few.
    many = 3 if small and tiles else 20
    fixed = [
        images((side // 2, side // 2)),
        images((side, side // 2), (side // 4, side)),
        images((side // 2, side), (side // 4, side), (side, side // 3)),
        images((side, side), *[(side // 8, side // 8)] * min(6, many)),
        images(*[(side // 3, side // 3)] * many),
        images((side // 2, side // 2), large, (side // 4, side // 2)),
        images(large),
    ]
    if not random_batches:
        return fixed
    cases = default_cases(
        modalities, many, largest_side=2 * side, random_batches=random_batches
    )
    return [*fixed, *cases[-1].batches]


def write_references(
    rank: int, ranks: int, encoder: Encoder, checkpoint: Path, batches: list[MediaBatch]
) -> None:
    """What the model makes of every batch on a single rank, as files."""
    import torch

    from vllm_encoder_cg.samples.encoder_inputs import media_batch
    from vllm_encoder_cg.verification import eager_embeddings

    with built(encoder, ranks, checkpoint) as manager:
        for seed, batch in enumerate(batches):
            mm_kwargs = media_batch(manager.adapter, batch, seed)
            embeddings = eager_embeddings(manager.model, mm_kwargs)
            torch.save([each.cpu() for each in embeddings], _file(checkpoint, seed))


def _file(checkpoint: Path, seed: int) -> Path:
    return checkpoint.parent / f"{seed}.pt"


def check_on_rank(
    rank: int,
    ranks: int,
    encoders: list[Encoder],
    results: Results,
    checkpoint: Path,
    batches: list[MediaBatch],
) -> None:
    """This rank's outputs against the files, once per mode that vLLM comes to."""
    modes: set[str] = set()
    for encoder in encoders:
        with built(encoder, ranks, checkpoint) as manager:
            multimodal = manager.vllm_config.model_config.multimodal_config
            mode = multimodal.mm_encoder_tp_mode
            if mode in modes:
                continue
            modes.add(mode)
            result = Correctness(str(encoder), ranks, mode)
            _check_batches(manager, rank, checkpoint, batches, result)
            of_ranks = manager._ranks.everyone(result)
            if rank == 0:
                results.add({"part": "correctness"} | vars(_join(of_ranks)))


def _check_batches(
    manager: Any,
    rank: int,
    checkpoint: Path,
    batches: list[MediaBatch],
    result: Correctness,
) -> None:
    from vllm_encoder_cg.verification import verify_tolerance

    result.tolerance = verify_tolerance(manager)
    capture(manager)
    if not manager.is_captured():
        result.problems.append(f"no graphs: {manager.inactive_reason}")
    for seed, batch in enumerate(batches):
        _compare(manager, batch, seed, checkpoint, result)
    alone = result.mode == "data" and rank == result.ranks - 1
    with _failing(manager, alone or result.mode == "weights"):
        for seed, batch in list(enumerate(batches))[:_WITH_FAILURES]:
            _compare(manager, batch, seed, checkpoint, result)
    if result.ranks > 1 and alone:
        for key in list(manager._graphs.graphs)[::2]:
            manager._graphs.drop(key)
        manager._plan_anew()
    for seed, batch in list(enumerate(batches))[:_WITH_DROPPED_GRAPHS]:
        _compare(manager, batch, seed, checkpoint, result)
    result.replayed = manager.stats.hits
    result.eager = manager.stats.misses.total()


def _failing(manager: Any, fails: bool) -> AbstractContextManager[Any]:
    """Batches raise on this rank when they are to be replayed."""
    if not fails:
        return nullcontext()
    return mock.patch.object(
        manager.adapter, "fill", side_effect=RuntimeError("of the check")
    )


def _compare(
    manager: Any, batch: MediaBatch, seed: int, checkpoint: Path, result: Correctness
) -> None:
    import torch

    from vllm_encoder_cg.samples.encoder_inputs import media_batch
    from vllm_encoder_cg.startup.rounding import relative_norm

    outputs = encode(manager, media_batch(manager.adapter, batch, seed))
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
