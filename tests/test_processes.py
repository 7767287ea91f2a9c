# SPDX-License-Identifier: Apache-2.0
"""Several models, managers and processes: none disturbs another."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.support.small_encoders import SmallEncoders, ordinary_images
from tests.support.variants import make_variant
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import eager_embeddings

GEMMA3 = "Gemma3ForConditionalGeneration"
INTERNVL = "InternVLChatModel"
QWEN2 = "Qwen2VLForConditionalGeneration"
TIMEOUT_S = 120


def error(outputs: list[torch.Tensor] | None, expected: list[torch.Tensor]) -> float:
    assert outputs is not None
    return max(map(relative_norm, outputs, expected))


def is_right(manager: EncoderCudaGraphManager, seed: int = 0) -> bool:
    inputs = ordinary_images(manager, seed)
    expected = eager_embeddings(manager.model, inputs)
    hits = manager.stats.hits
    outputs = manager.execute(inputs)
    return error(outputs, expected) < 1e-4 and manager.stats.hits == hits + 3


def test_models_in_turn(small_encoders: SmallEncoders) -> None:
    """As two engines in one process, or a draft model beside the target."""
    managers = [small_encoders.get(name) for name in (QWEN2, GEMMA3, INTERNVL)]
    for seed in range(3):
        for manager in managers:
            assert is_right(manager, seed)
            for other in managers:
                if other is not manager:
                    other.poison_buffers()


def test_managers_of_one_model(
    small_encoders: SmallEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM makes one to estimate memory, and another to serve."""
    first = small_encoders.get(QWEN2)
    second = make_variant(first, monkeypatch, budgets=(32, 96), cost_model=False)
    second.capture()
    for seed in range(3):
        assert is_right(first, seed) and is_right(second, seed)
    second.clear()
    assert is_right(first)
    assert second.execute(ordinary_images(second)) is None


def test_a_model_that_is_unloaded_leaves_nothing() -> None:
    """And another one takes its place in the same process."""
    options = EncoderOptions(
        architecture=GEMMA3, budgets=(64,), settings={"cost_model": False}
    )
    left = []
    for seed in range(2):
        with captured_encoder(options) as manager:
            assert is_right(manager, seed)
            left += [
                weakref.ref(manager.model),
                weakref.ref(manager),
                weakref.ref(next(iter(manager._graphs.graphs.values())).output_buffer),
            ]
            manager.clear()
            del manager
        gc.collect()
        assert [ref() for ref in left] == [None] * len(left)


def test_a_forked_process_has_graphs_of_its_own(
    small_encoders: SmallEncoders,
) -> None:
    """On a GPU a process that has used CUDA cannot be forked, as vLLM knows."""
    manager = small_encoders.get(GEMMA3)
    inputs = ordinary_images(manager)
    expected = small_encoders.expected(GEMMA3)

    def child(connection: Connection) -> None:
        torch.set_num_threads(1)
        found = error(manager.execute(inputs), expected)
        manager.poison_buffers()
        connection.send(found)

    assert run_in_process("fork", child) < 1e-4
    assert is_right(manager)


def test_a_spawned_process_starts_afresh() -> None:
    assert run_in_process("spawn", encode_toy) == 0


def encode_toy(connection: Connection) -> None:
    """Captures and replays in a process that has imported nothing before."""
    from tests.support.toy_adapter import encode_eagerly, make_items
    from tests.support.toy_manager import make_toy_manager

    with pytest.MonkeyPatch.context() as patch:
        manager = make_toy_manager(patch)
    items = make_items((2, 8), (0, 8))
    connection.send(error(manager.execute(items), encode_eagerly(items)))


def run_in_process(method: str, function: Any) -> float:
    """What `function` sends from a process of its own."""
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(sender,))
    process.start()
    sender.close()
    try:
        assert receiver.poll(TIMEOUT_S), "the process does not answer"
        return receiver.recv()
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
