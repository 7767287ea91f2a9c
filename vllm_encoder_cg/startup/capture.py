# SPDX-License-Identifier: Apache-2.0
"""Recording a set of graphs over shared buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, GraphShape
from vllm_encoder_cg.buffers import BufferArena
from vllm_encoder_cg.definitions import BatchLimits, BudgetGraphMetadata, GraphKey
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.graphs import GraphRecorder, ReplayableGraph, make_recorder
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.progress import track
from vllm_encoder_cg.ranks import EncoderRanks
from vllm_encoder_cg.startup.memory_limit import MemoryLimit
from vllm_encoder_cg.startup.memory_meter import MemoryMeter, peak_bytes
from vllm_encoder_cg.startup.warm_ups import WarmUps

logger = init_logger(__name__)

T = TypeVar("T")


def capture_graphs(
    adapter: EncoderAdapter,
    shapes: Sequence[GraphShape],
    limits: BatchLimits,
    device: torch.device,
    graph_pool: Any,
    ranks: EncoderRanks,
    memory_limit_bytes: float | None = None,
) -> GraphSet:
    """Records a graph for every shape, in the order given (largest first).

    A shape that fails is dropped with one warning and gives its memory back.

    Args:
        memory_limit_bytes: the largest graphs of a path are left out until what is
            captured takes no more; smaller ones share the memory of larger ones.

    Raises:
        OutOfStepError: recording a sharded encoder failed on some ranks only.
    """
    memory = MemoryMeter(device)
    limit = MemoryLimit(memory_limit_bytes)
    every = False
    while True:
        limit.begin()
        warm_ups = WarmUps(adapter, ranks, every)
        result = _capture_all(
            adapter,
            shapes,
            limits,
            make_recorder(device, graph_pool),
            ranks,
            memory,
            limit,
            warm_ups,
        )
        if result is not None:
            break
        every = every or warm_ups.failed
        memory.give_back()
    result.memory_bytes = max(memory.taken_bytes(), result.arena.nbytes())
    limit.report(result.memory_bytes)
    return result


def _capture_all(
    adapter: EncoderAdapter,
    shapes: Sequence[GraphShape],
    limits: BatchLimits,
    recorder: GraphRecorder,
    ranks: EncoderRanks,
    memory: MemoryMeter,
    limit: MemoryLimit,
    warm_ups: WarmUps,
) -> GraphSet | None:
    """All graphs; None: they are to be captured anew, as one of them should have been
    run before its capture, or took too much."""
    result = GraphSet.empty(memory.device)
    for shape in track(shapes, "Capturing encoder CUDA graphs", ranks.rank == 0):
        if not limit.admits(shape.key):
            continue
        result.shapes[shape.key] = shape
        error: Exception | None = None
        to_measure = limit.is_to_measure(shape.key)
        if to_measure:
            error, (peak, own) = _measure(result, adapter, shape, ranks)
            peak, own = ranks.in_step((peak, own))
            if error is None and not limit.holds(
                shape.key,
                result.arena.nbytes(),
                own,
                _of_smaller_ones(own, shapes, shape.key),
                peak,
            ):
                del result.shapes[shape.key]
                result.release_unused(shape.key.path)
                memory.give_back()
                continue
        error = error or _capture_one(
            result, adapter, shape, limits, recorder, ranks, warm_ups
        )
        if warm_ups.failed:
            return None
        if error is None:
            if to_measure:
                taken = ranks.in_step(memory.taken_bytes())
                alone = len(result.graphs) == 1
                if not limit.held(shape.key, taken, alone=alone):
                    if not alone:
                        return None
                    result.leave_out(shape.key)
                    memory.give_back()
            continue
        result.drop(shape.key)
        result.release_unused(shape.key.path)
        logger.warning(
            "Encoder CUDA graph (%s) could not be captured and is left out; "
            "what it would have held runs eagerly: %s: %s",
            shape.key,
            type(error).__name__,
            # As text: whoever keeps the record must not keep tensors with it.
            str(error),
        )
        del error
        memory.give_back()
    return result


def _measure(
    result: GraphSet, adapter: EncoderAdapter, shape: GraphShape, ranks: EncoderRanks
) -> tuple[Exception | None, tuple[int, int]]:
    """What one forward takes at its highest, and what its graph has for itself of
    buffers, in bytes; or why it cannot run."""
    path, device = shape.key.path, result.arena.device

    def forward(buffers: dict[str, torch.Tensor]) -> tuple[int, int]:
        with torch.inference_mode():
            output, peak = peak_bytes(lambda: adapter.forward(buffers, shape), device)
        result.arena.output(path, tuple(output.shape), output.dtype)
        return peak, result.arena.bytes_beside(buffers)

    error, measured = _run(result, adapter, shape, ranks, forward)
    return error, measured or (0, 0)


def _of_smaller_ones(size: int, shapes: Sequence[GraphShape], key: GraphKey) -> int:
    """What grows with the budget, `size` at that of `key`, for all smaller graphs of
    its group together."""
    budgets = [s.key.token_budget for s in shapes if s.key.group == key.group]
    tokens = sum(budget for budget in budgets if budget < key.token_budget)
    return size * tokens // key.token_budget


def _run(
    result: GraphSet,
    adapter: EncoderAdapter,
    shape: GraphShape,
    ranks: EncoderRanks,
    call: Callable[[dict[str, torch.Tensor]], T],
) -> tuple[Exception | None, T | None]:
    """What `call` makes of the captured inputs of a graph, on all ranks or none."""
    error: Exception | None = None
    buffers: dict[str, torch.Tensor] = {}
    try:
        buffers = _prepare(adapter, shape, result.arena)
    except Exception as failure:
        error = failure
    if not ranks.ready_for_forward(error is None):
        return error or RuntimeError("another rank could not prepare it"), None
    value: T | None = None
    with ranks.recording(result.arena.device):
        try:
            value = call(buffers)
        except Exception as failure:
            error = failure
        if not ranks.after_forward(error):
            return error or RuntimeError("another rank could not run it"), None
    return None, value


def _capture_one(
    result: GraphSet,
    adapter: EncoderAdapter,
    shape: GraphShape,
    limits: BatchLimits,
    recorder: GraphRecorder,
    ranks: EncoderRanks,
    warm_ups: WarmUps,
) -> Exception | None:
    """Adds one graph to `result`; or returns why there is none."""
    path = shape.key.path

    def record(
        buffers: dict[str, torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], ReplayableGraph, torch.Tensor]:
        graph, output = warm_ups.record(
            recorder,
            shape,
            lambda: adapter.forward(buffers, shape),
            lambda size, dtype: result.arena.output(path, size, dtype),
        )
        return buffers, graph, output

    error, recorded = _run(result, adapter, shape, ranks, record)
    if recorded is None:
        return error
    buffers, graph, output = recorded
    key = shape.key
    result.graphs[key] = BudgetGraphMetadata(
        token_budget=key.token_budget,
        max_batch_size=limits.max_items,
        max_frames_per_batch=limits.max_frames,
        graph=graph,
        input_buffers=buffers,
        output_buffer=output,
        axis_keys=key.axis_keys,
        capacity=shape.capacity,
    )
    return None


def _prepare(
    adapter: EncoderAdapter, shape: GraphShape, arena: BufferArena
) -> dict[str, torch.Tensor]:
    """The captured inputs of one graph."""
    if shape.capacity.tokens < shape.key.token_budget:
        raise ValueError(
            f"the adapter's capacity of {shape.capacity.tokens} tokens is below the "
            f"budget {shape.key.token_budget}"
        )
    return adapter.capture_buffers(shape, arena)
