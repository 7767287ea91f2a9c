# SPDX-License-Identifier: Apache-2.0
"""The fused forward on exactly one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_encoder_cg.adapter import EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import BatchLimits, GraphKey
from vllm_encoder_cg.manager import EncoderCudaGraphManager


def execute(manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]) -> Any:
    """The embeddings, as a runner gets them."""
    with torch.inference_mode():
        result = manager.execute(mm_kwargs)
        if result is None:
            result = manager.model.embed_multimodal(**mm_kwargs)
    return result


def exact_inputs(
    manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> tuple[EncoderBatch, GraphShape, dict[str, torch.Tensor]]:
    """A batch in buffers that it fills exactly."""
    adapter = manager.adapter
    batch = adapter.parse(mm_kwargs)
    assert batch is not None
    tokens = sum(spec.output_tokens for spec in batch.specs)
    key = GraphKey(next(iter(manager.config.paths)), tokens)
    items = len(batch.specs)
    shape = GraphShape(key, adapter.capacity(key, BatchLimits(items, items)))
    buffers = {
        name: torch.zeros(spec.shape, dtype=spec.dtype, device=manager.device)
        for name, spec in adapter.buffer_specs(shape).items()
    }
    adapter.fill(batch, range(items), buffers, shape)
    return batch, shape, buffers


@dataclass
class ExactGraph:
    """A graph of the fused forward for exactly one batch; a call replays it."""

    graph: torch.cuda.CUDAGraph
    buffers: dict[str, torch.Tensor]
    output: torch.Tensor

    def __call__(self) -> None:
        self.graph.replay()


def exact_graph(
    manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> ExactGraph:
    _, shape, buffers = exact_inputs(manager, mm_kwargs)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(2):
            manager.adapter.forward(buffers, shape)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            output = manager.adapter.forward(buffers, shape)
    torch.cuda.synchronize()
    return ExactGraph(graph, buffers, output)
