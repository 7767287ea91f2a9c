# SPDX-License-Identifier: Apache-2.0
"""Recording a set of graphs over shared buffers, and replaying one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.buffers import BufferArena
from vllm_encoder_cg.definitions import (
    AxisKeys,
    BatchLimits,
    BudgetGraphMetadata,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.graphs import GraphRecorder, make_recorder
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.memory_meter import MemoryMeter
from vllm_encoder_cg.ranks import EncoderRanks

logger = init_logger(__name__)


@dataclass
class GraphSet:
    """The graphs of one manager with the storage that they share."""

    arena: BufferArena
    graphs: dict[GraphKey, BudgetGraphMetadata] = field(default_factory=dict)
    shapes: dict[GraphKey, GraphShape] = field(default_factory=dict)
    dropped: dict[GraphKey, GraphCapacity] = field(default_factory=dict)
    """Graphs that failed to capture or to pass the self-check."""
    memory_bytes: int = 0
    """Device memory taken: buffers and graph pool."""
    seconds: float = 0.0
    _stream: Any = field(default=None, init=False, repr=False)
    """Of the last replay."""

    @classmethod
    def empty(cls, device: torch.device) -> GraphSet:
        return cls(BufferArena(device))

    def drop(self, key: GraphKey) -> None:
        """Takes a graph out of use."""
        self.graphs.pop(key, None)
        self.dropped[key] = self.shapes[key].capacity

    def drop_all(self) -> None:
        """Takes all graphs out of use and gives their buffers back."""
        for key in list(self.graphs):
            self.drop(key)
            self.release_unused(key.path)
        self.memory_bytes = 0

    def leave_out(self, key: GraphKey) -> None:
        """Forgets a captured graph, and its buffers if its path has no other."""
        del self.graphs[key], self.shapes[key]
        self.release_unused(key.path)

    def release_unused(self, path: str) -> None:
        """Gives back the buffers of a path that has no graph."""
        if not any(key.path == path for key in self.graphs):
            self.arena.release(path)

    def replay(
        self,
        key: GraphKey,
        adapter: EncoderAdapter,
        batch: EncoderBatch,
        indices: Sequence[int],
    ) -> torch.Tensor:
        """Encodes the items at `indices` by one graph.

        Returns:
            ``[rows, hidden]``: a copy of the items' rows, so that the next replay
            changes nothing that was handed out.
        """
        graph = self.graphs[key]
        rows = adapter.output_rows(batch, indices, key.path)
        if rows is not None and rows > graph.output_buffer.shape[0]:
            raise ValueError(
                f"{rows} rows are more than the {graph.output_buffer.shape[0]} of the "
                f"encoder CUDA graph ({key})"
            )
        self._follow_last_replay()
        adapter.fill(batch, indices, graph.input_buffers, self.shapes[key])
        graph.graph.replay()
        return graph.output_buffer[:rows].clone()

    def _follow_last_replay(self) -> None:
        """Orders what comes behind the last replay and the copy of its output.

        A stream does so by itself; this is for callers that change streams.
        """
        if self.arena.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.arena.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def summary(self) -> str:
        budgets: dict[str, list[int]] = {}
        for key in self.graphs:
            budgets.setdefault(key.path, []).append(key.token_budget)
        paths = "; ".join(
            f"{path}: {len(values)} graphs for {min(values)} to {max(values)} tokens"
            for path, values in budgets.items()
        )
        return (
            f"{paths}; {self.memory_bytes / 2**30:.2f} GiB, {self.seconds:.1f} s"
            f"{f', {len(self.dropped)} dropped' if self.dropped else ''}"
        )


class _MemoryLimit:
    """Which budgets to capture so that a limit holds.

    The first graph of a path, its largest, takes nearly all of the path's memory;
    so only first graphs are measured, and one that takes too much says by how much
    the next one has to be smaller.
    """

    def __init__(self, limit_bytes: float | None) -> None:
        self._limit = limit_bytes
        self._largest: dict[str, int] = {}
        self._measured: set[tuple[str, AxisKeys]] = set()

    def admits(self, key: GraphKey) -> bool:
        return key.token_budget <= self._largest.get(key.path, key.token_budget)

    def is_to_measure(self, key: GraphKey) -> bool:
        return (
            self._limit is not None and (key.path, key.axis_keys) not in self._measured
        )

    def holds(self, key: GraphKey, taken_bytes: int) -> bool:
        """Whether a graph that was just captured may stay.

        Args:
            taken_bytes: by all graphs so far.
        """
        assert self._limit is not None
        if taken_bytes <= self._limit:
            self._measured.add((key.path, key.axis_keys))
            return True
        budget = key.token_budget
        self._largest[key.path] = min(
            budget - 1, int(budget * self._limit / taken_bytes)
        )
        logger.info(
            "Encoder CUDA graph (%s) would take graph memory to %.2f GiB, above "
            "additional_config.encoder_cg.memory_limit_gib of %.2f; it and those above "
            "%d tokens are left out, and larger items run eagerly",
            key,
            taken_bytes / 2**30,
            self._limit / 2**30,
            self._largest[key.path],
        )
        return False


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
    begin = time.perf_counter()
    result = GraphSet.empty(device)
    recorder = make_recorder(device, graph_pool)
    memory = MemoryMeter(device)
    limit = _MemoryLimit(memory_limit_bytes)
    for shape in shapes:
        if not limit.admits(shape.key):
            continue
        result.shapes[shape.key] = shape
        error = _capture_one(result, adapter, shape, limits, recorder, ranks)
        if error is None:
            if limit.is_to_measure(shape.key):
                taken = ranks.in_step(memory.taken_bytes())
                if not limit.holds(shape.key, taken):
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
            error,
        )
        del error
        memory.give_back()
    result.memory_bytes = max(memory.taken_bytes(), result.arena.nbytes())
    result.seconds = time.perf_counter() - begin
    return result


def _capture_one(
    result: GraphSet,
    adapter: EncoderAdapter,
    shape: GraphShape,
    limits: BatchLimits,
    recorder: GraphRecorder,
    ranks: EncoderRanks,
) -> Exception | None:
    """Adds one graph to `result`; or returns why there is none."""
    error: Exception | None = None
    buffers: dict[str, torch.Tensor] = {}
    try:
        buffers = _prepare(adapter, shape, result.arena)
    except Exception as failure:
        error = failure
    if not ranks.ready_for_forward(error is None):
        return error or RuntimeError("another rank could not prepare it")
    with ranks.recording(result.arena.device):
        try:
            graph, output = recorder.record(
                lambda: adapter.forward(buffers, shape),
                lambda size, dtype: result.arena.output(shape.key.path, size, dtype),
            )
        except Exception as failure:
            error = failure
        well = ranks.after_forward(error)
    if not well:
        return error
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
