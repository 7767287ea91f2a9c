# SPDX-License-Identifier: Apache-2.0
"""Sizes are compared on the host before anything is copied or looked up.

What is written beyond a buffer, or read beyond a table, ends a GPU's process.  The
planner only lets items into a graph that fit; this is what holds if it erred.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.native_model import NativeModel
from tests.support.small_encoders import (
    ARCHITECTURES,
    DEEPSEEK,
    SmallEncoders,
    ordinary_images,
    ordinary_videos,
)
from tests.support.toy_adapter import make_toy_config
from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.host_tables import copy_rows
from vllm_encoder_cg.models.soft_token_positions import PADDING, keep_inside
from vllm_encoder_cg.models.soft_token_rows import copy_token_rows
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import eager_embeddings

GEMMA4 = "Gemma4ForConditionalGeneration"
GUARD = 64


class Guarded:
    """Buffers with known values on both sides."""

    def __init__(self, manager: EncoderCudaGraphManager, shape: GraphShape) -> None:
        self._memory: list[torch.Tensor] = []
        self.buffers: dict[str, torch.Tensor] = {}
        for name, spec in manager.adapter.buffer_specs(shape).items():
            size = torch.Size(spec.shape).numel()
            memory = torch.full((size + 2 * GUARD,), 7, dtype=spec.dtype)
            self._memory.append(memory)
            self.buffers[name] = memory[GUARD : GUARD + size].view(spec.shape)

    def assert_untouched_outside(self) -> None:
        for memory in self._memory:
            assert memory[:GUARD].eq(7).all() and memory[-GUARD:].eq(7).all()


def smallest_shape(manager: EncoderCudaGraphManager) -> GraphShape:
    """Of the first path."""
    path = next(iter(manager.config.paths))
    keys = [key for key in manager._graphs.graphs if key.path == path]
    return manager._graphs.shapes[min(keys, key=lambda key: key.token_budget)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_more_than_a_graph_holds_is_not_written(
    architecture: str, small_encoders: SmallEncoders
) -> None:
    manager = small_encoders.get(architecture)
    shape = smallest_shape(manager)
    batch = manager.adapter.parse(ordinary_images(manager))
    assert batch is not None
    guarded = Guarded(manager, shape)
    # The same images over and over.
    tokens = sum(s.get_path_output_tokens(shape.key.path) for s in batch.specs)
    indices = [0, 1, 2] * (2 + shape.capacity.tokens // tokens)
    with pytest.raises(ValueError):
        manager.adapter.fill(batch, indices, guarded.buffers, shape)
    guarded.assert_untouched_outside()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_fits_is_written_inside(
    architecture: str, small_encoders: SmallEncoders
) -> None:
    manager = small_encoders.get(architecture)
    shape = smallest_shape(manager)
    batch = manager.adapter.parse(ordinary_images(manager))
    assert batch is not None
    guarded = Guarded(manager, shape)
    manager.adapter.fill(batch, [2], guarded.buffers, shape)
    guarded.assert_untouched_outside()


@pytest.mark.parametrize(
    ("source", "offsets"),
    [
        ((4, 3), [0, 2, 4, 9]),  # rows that are not there
        ((9, 2), [0, 2, 4, 9]),  # narrower
        ((9, 1), [0, 2, 4, 9]),  # would be repeated
        ((9, 6), [0, 2, 4, 9]),  # wider
        ((40, 3), [0, 2, 4, 40]),  # too many
    ],
)
@pytest.mark.parametrize("indices", [[0, 1, 2], [2, 0], [2]])
def test_rows_are_compared_with_source_and_buffer(
    source: tuple[int, ...], offsets: list[int], indices: list[int]
) -> None:
    memory = torch.full((64, 3), 7.0)
    address = memory.data_ptr()
    buffer = memory[8:24]
    with pytest.raises(ValueError):
        copy_rows(torch.zeros(source), offsets, indices, buffer)
    assert memory.eq(7).all() and memory.data_ptr() == address


@pytest.mark.parametrize("length", [3, 8])
def test_rows_of_a_list_are_compared_with_the_buffer(length: int) -> None:
    memory = torch.full((8, 5, 2), 7.0)
    rows = [torch.zeros(length, 2)] * 2
    with pytest.raises(ValueError):
        copy_token_rows(rows, [0, 1, 2], [0, 1], memory[2:4])
    assert memory.eq(7).all()


@pytest.mark.parametrize("rows", [-1, 1])
def test_rows_that_do_not_belong_to_the_items_are_not_gathered(
    rows: int, small_encoders: SmallEncoders
) -> None:
    """DeepSeek-OCR stitches rows together by an index."""
    manager = small_encoders.get(DEEPSEEK)
    batch = manager.adapter.parse(ordinary_images(manager))
    assert batch is not None
    outputs = {
        path: torch.zeros(
            sum(spec.get_path_output_tokens(path) for spec in batch.specs) + rows,
            manager.config.out_hidden_size,
        )
        for path in manager.config.paths
    }
    with pytest.raises(ValueError, match="rows instead of"):
        manager.adapter.assemble(batch, [0, 1, 2], outputs)


class Broadcasts(NativeModel):
    """Its replay buffers have another width than its captured ones."""

    def prepare_encoder_cudagraph_replay_buffers(
        self, *args: Any, **kwargs: Any
    ) -> Any:
        buffers = super().prepare_encoder_cudagraph_replay_buffers(*args, **kwargs)
        pixels = buffers.values["pixel_values"]
        buffers.values["pixel_values"] = pixels[:, :1]
        return buffers


def test_a_model_s_own_tensors_are_not_broadcast() -> None:
    """One that vLLM's protocol drives: a copy would fill rows with one value."""
    config = make_toy_config(encoder_cudagraph_token_budgets=[8])
    config.model_config.dtype = torch.float32
    manager = EncoderCudaGraphManager(
        config, torch.device("cpu"), torch.float32, Broadcasts()
    )
    manager.capture()
    inputs = {
        "pixel_values": torch.randn(4, 6),
        "image_patches": torch.tensor([4]),
    }
    assert manager.execute(inputs) is None


# -- Gemma 4 ------------------------------------------------------------------------


def test_frames_in_a_list(small_encoders: SmallEncoders) -> None:
    """vLLM gives a list where rows differ in length; videos have many rows each."""
    manager = small_encoders.get(GEMMA4)
    inputs = ordinary_videos(manager)
    expected = eager_embeddings(manager.model, inputs)
    listed = {
        name: list(value) if name.startswith("pixel") else value
        for name, value in inputs.items()
    }
    outputs = manager.execute(listed)
    assert outputs is not None
    errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
    assert max(errors) < 1e-4


def positions(*rows: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("row", "fits"),
    [
        ([(0, 0), (1, 0), (0, 1), (1, 1)], True),
        ([(2, 0), (3, 0), (2, 1), (3, 1)], True),
        ([(0, 0), (1, 0), (PADDING, PADDING), (PADDING, PADDING)], True),
        ([(PADDING, PADDING)] * 4, True),
        ([(0, 0), (1, 0), (0, 9), (1, 9)], False),  # beyond the soft tokens
        ([(0, 0), (1, 0), (0, 1), (20, 1)], False),  # beyond the embeddings
        ([(2**40, 0), (1, 0), (0, 1), (1, 1)], False),
    ],
)
def test_positions_beyond_a_table_become_padding(
    row: list[tuple[int, int]], fits: bool
) -> None:
    good = [(0, 0), (1, 0), (0, 1), (1, 1)]
    given = positions(row, good)
    kept, marks = keep_inside(given, kernel=2, length=2, table_size=16)
    assert torch.equal(kept[1], given[1]) and marks[1] == 0
    assert marks[0].isnan() == (not fits)
    assert torch.equal(kept[0], given[0] if fits else torch.full((4, 2), PADDING))
