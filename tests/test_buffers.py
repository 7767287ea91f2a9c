# SPDX-License-Identifier: Apache-2.0
"""Budgets of a path read slices of one allocation."""

from __future__ import annotations

import torch

from vllm_encoder_cg.adapter import BufferSpec
from vllm_encoder_cg.buffers import BufferArena


def make_arena() -> BufferArena:
    return BufferArena(torch.device("cpu"))


def specs(rows: int, dtype: torch.dtype = torch.float32) -> dict[str, BufferSpec]:
    return {
        "pixels": BufferSpec((rows, 4), dtype),
        "tables": BufferSpec((rows + 1,), torch.int32),
    }


def test_shapes_types_and_zeros() -> None:
    buffers = make_arena().inputs("default", specs(8, torch.bfloat16))
    assert buffers["pixels"].shape == (8, 4)
    assert buffers["pixels"].dtype == torch.bfloat16
    assert buffers["tables"].shape == (9,) and buffers["tables"].dtype == torch.int32
    assert not buffers["pixels"].any() and not buffers["tables"].any()


def test_a_smaller_budget_is_the_beginning_of_a_larger() -> None:
    arena = make_arena()
    large = arena.inputs("default", specs(8))
    bytes_of_large = arena.nbytes()
    small = arena.inputs("default", specs(3))
    assert arena.nbytes() == bytes_of_large == 8 * 4 * 4 + 9 * 4
    for name in ("pixels", "tables"):
        assert small[name].data_ptr() == large[name].data_ptr()
    small["pixels"].fill_(1)
    assert large["pixels"][:3].all() and not large["pixels"][3:].any()


def test_paths_and_types_have_storage_of_their_own() -> None:
    arena = make_arena()
    buffers = [
        arena.inputs("global", specs(8))["pixels"],
        arena.inputs("local", specs(8))["pixels"],
        arena.inputs("global", specs(8, torch.float16))["pixels"],
    ]
    assert len({buffer.data_ptr() for buffer in buffers}) == 3


def test_an_outgrown_buffer_stays_where_a_graph_expects_it() -> None:
    arena = make_arena()
    small = arena.inputs("default", specs(3))["pixels"]
    small.fill_(7)
    large = arena.inputs("default", specs(8))["pixels"]
    large.fill_(1)
    assert (small == 7).all()
    assert arena.nbytes() == (3 + 8) * 4 * 4 + (4 + 9) * 4


def test_outputs_of_all_paths_share_storage() -> None:
    arena = make_arena()
    first = arena.output("default", (8, 4), torch.float32)
    second = arena.output("default", (2, 16), torch.float32)
    other = arena.output("default", (8, 4), torch.bfloat16)
    assert first.data_ptr() == second.data_ptr() != other.data_ptr()
    assert arena.nbytes() == 8 * 4 * 4 + 8 * 4 * 2


def test_poison_reaches_all_but_tables() -> None:
    arena = make_arena()
    buffers = arena.inputs("default", specs(8))
    buffers["tables"].fill_(5)
    bytes_in = arena.inputs("bytes", specs(8, torch.uint8))["pixels"]
    output = arena.output("default", (8, 4), torch.float32)
    arena.poison()
    assert buffers["pixels"].isnan().all() and output.isnan().all()
    assert (bytes_in == 255).all()
    assert (buffers["tables"] == 5).all()
