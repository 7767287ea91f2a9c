# SPDX-License-Identifier: Apache-2.0
"""Ten thousand random batches: every embedding right, memory flat.

A server meets them in minutes.  Items come from a pool whose embeddings the model
itself has made once, so that nearly all the time goes into replays.
"""

from __future__ import annotations

import gc
import random
import resource
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.small_encoders import Inputs, SmallEncoders
from tests.support.variants import make_variant
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.encoder_inputs import image_batch, video_batch
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import eager_embeddings

TOLERANCE = 1e-4
MIB = 1 << 20


@dataclass(frozen=True)
class Load:
    """How much one family of towers is given."""

    architecture: str
    batches: int
    budgets: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    """Images in pixels; the last is above every budget."""
    clips: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        return self.architecture


#: Together ten thousand.
LOADS = [
    Load(
        "Qwen3VLForConditionalGeneration",
        4000,
        (4, 8, 12, 16, 24),
        ((32, 32), (64, 32), (32, 96), (64, 64), (160, 32), (192, 160)),
        ((2, 32, 32), (4, 64, 32), (6, 32, 32)),
    ),
    Load(
        "Gemma3ForConditionalGeneration",
        3000,
        (16, 32, 48, 80),
        ((112, 112), (224, 112), (112, 336), (448, 336)),
    ),
    Load(
        "MiniCPMV2_6",
        3000,
        (8, 16, 24, 40),
        ((56, 56), (64, 32), (28, 112), (640, 640)),
        ((2, 56, 56), (3, 56, 28)),
    ),
]


@dataclass
class Item:
    """One image or video with what the model makes of it."""

    modality: str
    inputs: Inputs
    embedding: torch.Tensor


def make_pool(manager: EncoderCudaGraphManager, load: Load) -> list[Item]:
    batches = [
        ("image", image_batch(manager.adapter, [size], seed))
        for seed, size in enumerate(load.sizes)
    ] + [
        ("video", video_batch(manager.adapter, [clip], seed))
        for seed, clip in enumerate(load.clips)
    ]
    return [
        Item(modality, inputs, *eager_embeddings(manager.model, inputs))
        for modality, inputs in batches
    ]


def join(items: list[Item]) -> Inputs:
    """The inputs of a batch of these."""
    first, *others = (item.inputs for item in items)
    joined = dict(first)
    for inputs in others:
        for name, value in inputs.items():
            if isinstance(value, list):
                joined[name] = joined[name] + value
            elif isinstance(value, torch.Tensor) and value.ndim:
                joined[name] = torch.cat([joined[name], value])
    return joined


def used_memory() -> int:
    """Most bytes that this process has had resident, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def count_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_many_random_batches(
    load: Load, small_encoders: SmallEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = small_encoders.get(load.architecture)
    manager = make_variant(base, monkeypatch, budgets=load.budgets, cost_model=False)
    manager.capture()
    pool = make_pool(manager, load)
    by_modality = {
        modality: [item for item in pool if item.modality == modality]
        for modality in {item.modality for item in pool}
    }
    generator = random.Random(0)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    before: dict[str, Any] = {}
    buffers = manager._graphs.arena.nbytes()
    sent = 0
    for number in range(load.batches):
        if number == load.batches // 10:
            before = {"memory": used_memory(), "tensors": count_tensors()}
        modality = generator.choice(list(by_modality))
        items = generator.choices(by_modality[modality], k=generator.randint(1, 4))
        sent += len(items)
        outputs = manager.execute(join(items))
        if outputs is None:  # wholly above every budget
            continue
        for item, output in zip(items, outputs, strict=True):
            assert relative_norm(output, item.embedding) < TOLERANCE, number
        if number < 20:
            kept += [(output, output.clone()) for output in outputs]
    assert count_tensors() - before["tensors"] < 50
    assert used_memory() - before["memory"] < 64 * MIB
    assert manager._graphs.arena.nbytes() == buffers
    assert len(manager._graphs.graphs) == len(manager._shapes)
    assert all(torch.equal(output, copy) for output, copy in kept)
    assert manager.stats.items == sent
    assert manager.stats.hits > sent // 2 and manager.stats.misses.total() > 0
