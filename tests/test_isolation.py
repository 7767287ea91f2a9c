# SPDX-License-Identifier: Apache-2.0
"""Whom an image shares a sub-batch with, and what comes after, changes nothing in it.

vLLM's encoder cache holds embeddings across thousands of later batches.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.small_encoders import (
    ARCHITECTURES,
    VIDEO_ARCHITECTURES,
    Inputs,
    SmallEncoders,
    ordinary_images,
    ordinary_videos,
    spoil_item,
)
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import eager_embeddings

TOLERANCE = 1e-4
LATER_BATCHES = 12
NAN, INF = float("nan"), float("inf")

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture
def manager(
    architecture: str, small_encoders: SmallEncoders
) -> EncoderCudaGraphManager:
    return small_encoders.get(architecture)


def encode(manager: EncoderCudaGraphManager, inputs: Inputs) -> list[torch.Tensor]:
    """By graph."""
    misses = manager.stats.misses.total()
    outputs = manager.execute(inputs)
    assert outputs is not None
    assert manager.stats.misses.total() == misses
    return outputs


@each_architecture
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_a_bad_image_leaves_its_neighbours_alone(
    value: float, manager: EncoderCudaGraphManager
) -> None:
    """Bitwise: they are where they were, in the same graph."""
    clean = ordinary_images(manager)
    expected = encode(manager, clean)
    outputs = encode(manager, spoil_item(manager, clean, 1, value))
    assert torch.equal(outputs[0], expected[0])
    assert torch.equal(outputs[2], expected[2])
    assert not torch.equal(outputs[1], expected[1])
    # And nothing of it is left for the next one.
    assert all(map(torch.equal, encode(manager, clean), expected))


@each_architecture
def test_a_bad_image_is_as_bad_as_by_eager(manager: EncoderCudaGraphManager) -> None:
    """Nothing sensible-looking comes of pixels that are not numbers."""
    spoilt = spoil_item(manager, ordinary_images(manager), 1, NAN)
    outputs = encode(manager, spoilt)
    expected = eager_embeddings(manager.model, spoilt)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.shape == reference.shape
        if reference.isfinite().all():
            assert relative_norm(output, reference) < TOLERANCE
        else:
            assert output[reference.isnan()].isnan().all()


@each_architecture
def test_with_others_as_alone(manager: EncoderCudaGraphManager) -> None:
    together = encode(manager, ordinary_images(manager))
    batch = manager.adapter.parse(ordinary_images(manager))
    assert batch is not None
    for i, output in enumerate(together):
        with torch.inference_mode():
            rows = {
                path: manager.adapter.eager(batch, [i], path)
                for path in manager.config.paths
                if batch.specs[i].get_path_output_tokens(path)
            }
            (alone,) = manager.adapter.assemble(batch, [i], rows)
        assert relative_norm(output, alone) < TOLERANCE


@each_architecture
def test_outputs_belong_to_their_callers(
    architecture: str, manager: EncoderCudaGraphManager
) -> None:
    """None lies in a captured buffer, or changes while others are encoded."""
    arena = manager._graphs.arena
    buffers = {s.data_ptr(): s.nbytes() for s in storages(manager)}
    assert sum(buffers.values()) >= arena.nbytes()
    kept = encode(manager, ordinary_images(manager))
    if architecture in VIDEO_ARCHITECTURES:
        kept += encode(manager, ordinary_videos(manager))
    for output in kept:
        address = output.untyped_storage().data_ptr()
        assert not any(at <= address < at + size for at, size in buffers.items())
    copies = [output.clone() for output in kept]
    for seed in range(1, LATER_BATCHES):
        encode(manager, ordinary_images(manager, seed))
        manager.poison_buffers()
    assert all(map(torch.equal, kept, copies))


def storages(manager: EncoderCudaGraphManager) -> list[torch.UntypedStorage]:
    """Of everything that graphs read or write."""
    tensors = [
        tensor
        for graph in manager._graphs.graphs.values()
        for tensor in (graph.output_buffer, *graph.input_buffers.values())
    ]
    return [tensor.untyped_storage() for tensor in tensors]


@each_architecture
def test_callers_may_write_to_their_outputs(manager: EncoderCudaGraphManager) -> None:
    inputs = ordinary_images(manager)
    with torch.inference_mode():
        first = encode(manager, inputs)
        copies = [output.clone() for output in first]
        for output in first:
            output.fill_(NAN)
    assert all(map(torch.equal, encode(manager, inputs), copies))
