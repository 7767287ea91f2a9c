# SPDX-License-Identifier: Apache-2.0
"""The floor: CUDA graphs captured for exactly one batch, replayed with nothing
around them.  No budgeted replay of the same forward can be faster.

vLLM's own forward is captured where the model implements vLLM's protocol for
encoder graphs and the batch can be given to it whole, which is the only use that
this package makes of those methods where it has an adapter; else the adapter's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.benchmarking.timing import Call
from vllm_encoder_cg.definitions import AxisKeys, BatchLimits, GraphKey
from vllm_encoder_cg.graphs import CudaGraphRecorder
from vllm_encoder_cg.logger import init_logger

logger = init_logger(__name__)

VLLM_FORWARD = "vLLM's forward"
ADAPTER_FORWARD = "this package's forward"

Forward = Callable[[], Any]


def exact_shape_graphs(
    adapter: EncoderAdapter, batch: EncoderBatch
) -> tuple[Call, str] | None:
    """A call that replays graphs of exactly this batch, and what they are graphs
    of; None where neither forward can be captured.  Needs a GPU."""
    for kind, prepare in (
        (VLLM_FORWARD, _vllm_forwards),
        (ADAPTER_FORWARD, _adapter_forwards),
    ):
        try:
            graphs = [_capture(forward) for forward in prepare(adapter, batch)]
        except Exception as error:
            logger.info("No graph of %s: %s: %s", kind, type(error).__name__, error)
            torch.cuda.synchronize()
            continue
        if graphs:
            return _replay_all(graphs), kind
    return None


def _replay_all(graphs: list[tuple[Any, Any]]) -> Call:
    def replay() -> None:
        for graph, _ in graphs:
            graph.replay()

    return replay


def _capture(forward: Forward) -> tuple[Any, Any]:
    """The graph, with its output, which must live as long."""
    outputs: list[torch.Tensor] = []
    corner: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        outputs[:] = [forward()]
        return outputs[0][:1, :1]

    def make_output(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not corner:
            corner.append(torch.empty(shape, dtype=dtype, device="cuda"))
        return corner[0]

    # The recorder copies what it is given, so it is given one element: the floor
    # has nothing around the forward.
    graph, _ = CudaGraphRecorder().record(run, make_output)
    torch.cuda.synchronize()
    return graph, (forward, outputs, corner)


def _vllm_forwards(adapter: EncoderAdapter, batch: EncoderBatch) -> list[Forward]:
    """vLLM's forward per path, with the tables that it makes for this batch."""
    model = adapter.model
    if not hasattr(model, "prepare_encoder_cudagraph_replay_buffers"):
        return []
    items = len(batch.specs)
    # Whatever has sequences of its own: frames, where the model counts them.
    frames = sum(max(1, spec.demand.get("sequences", 1)) for spec in batch.specs)
    selected = model.select_encoder_cudagraph_items(
        dict(batch.mm_kwargs), list(range(items))
    )
    try:
        from vllm.v1.worker.encoder_cudagraph_defs import (
            ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG,
        )

        selected.pop(ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG, None)
    except ImportError:
        pass  # a vLLM without capture axes
    forwards = []
    for path in _paths_with_tokens(adapter, batch):
        values = model.prepare_encoder_cudagraph_replay_buffers(
            selected, items, max(frames, items), path
        ).values
        forwards.append(_vllm_forward(model, values, path))
    return forwards


def _vllm_forward(model: Any, values: dict[str, Any], path: str) -> Forward:
    def forward() -> Any:
        # A copy of the dictionary: some models take entries out.
        return model.encoder_cudagraph_forward({**values}, path)

    return forward


def _adapter_forwards(adapter: EncoderAdapter, batch: EncoderBatch) -> list[Forward]:
    """The adapter's forward per path and axis keys, at exactly this size."""
    groups: dict[AxisKeys, list[int]] = {}
    for i, spec in enumerate(batch.specs):
        groups.setdefault(spec.axis_keys, []).append(i)
    forwards = []
    for path in _paths_with_tokens(adapter, batch):
        for axis_keys, members in groups.items():
            of_path = [
                i for i in members if batch.specs[i].get_path_output_tokens(path)
            ]
            if of_path:
                forwards.append(
                    _adapter_forward(adapter, batch, of_path, path, axis_keys)
                )
    return forwards


def _adapter_forward(
    adapter: EncoderAdapter,
    batch: EncoderBatch,
    indices: list[int],
    path: str,
    axis_keys: AxisKeys,
) -> Forward:
    shape = _exact_shape(adapter, batch, indices, path, axis_keys)
    device = next(adapter.model.parameters()).device
    buffers = {
        name: torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        for name, spec in adapter.buffer_specs(shape).items()
    }
    adapter.fill(batch, indices, buffers, shape)
    return lambda: adapter.forward(buffers, shape)


def _exact_shape(
    adapter: EncoderAdapter,
    batch: EncoderBatch,
    indices: list[int],
    path: str,
    axis_keys: AxisKeys,
) -> GraphShape:
    """The smallest shape that holds the items."""
    specs = [batch.specs[i] for i in indices]
    tokens = sum(spec.get_path_output_tokens(path) for spec in specs)
    frames = sum(spec.demand.get("sequences", 1) for spec in specs)
    limits = BatchLimits(len(specs), max(frames, len(specs)))
    budget = tokens
    # Rows that are not full take more than their tokens say.
    while budget <= 16 * tokens:
        key = GraphKey(path, budget, axis_keys)
        capacity = adapter.capacity(key, limits)
        if all(
            sum(spec.demand.get(name, 0) for spec in specs) <= limit
            for name, limit in capacity.extra.items()
        ):
            return GraphShape(key, capacity)
        budget += max(1, tokens // 16)
    raise ValueError(f"no capacity of path {path!r} holds {len(specs)} items")


def _paths_with_tokens(adapter: EncoderAdapter, batch: EncoderBatch) -> list[str]:
    return [
        path
        for path in adapter.config().paths
        if any(spec.get_path_output_tokens(path) for spec in batch.specs)
    ]
