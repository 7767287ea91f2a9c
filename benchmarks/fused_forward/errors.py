# SPDX-License-Identifier: Apache-2.0
"""Errors in BF16 against the same tower in float64."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.fused_forward.graphs import exact_inputs, execute
from vllm_encoder_cg import kernels
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.fused.attention import Attend
from vllm_encoder_cg.startup.rounding import relative_norm


def errors_against_float64(
    fused: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> dict[str, float]:
    """Relative norms of the difference from the tower in float64."""
    batch, shape, buffers = exact_inputs(fused, mm_kwargs)
    tokens = sum(spec.output_tokens for spec in batch.specs)
    with torch.inference_mode():
        eager = fused.adapter.eager(batch, range(len(batch.specs)), shape.key.path)
        graph = torch.cat(list(execute(fused, mm_kwargs)))
    with _float64(fused), torch.inference_mode():
        exact = fused.adapter.forward(buffers, shape)[:tokens]
        torch.cuda.synchronize()
    return {
        "eager": relative_norm(eager.double(), exact),
        "fused": relative_norm(graph.double(), exact),
    }


@contextlib.contextmanager
def _float64(manager: EncoderCudaGraphManager) -> Iterator[None]:
    """The tower's weights as float64, and plain operations in place of kernels."""
    modules = [manager.adapter.tower]  # type: ignore[attr-defined]
    for name in ("resampler_model", "multi_modal_projector", "mlp1"):
        if hasattr(manager.model, name):
            modules.append(getattr(manager.model, name))
    tensors = [
        tensor
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.is_floating_point()
    ]
    before = [tensor.data for tensor in tensors]
    norm = getattr(modules[0], "input_norm", None)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(kernels, "is_available", lambda device: False))
        enter(mock.patch.object(Attend, "__call__", _exact_attention))
        if norm is not None:
            enter(mock.patch.object(norm, "forward", _normalise_wide(norm.forward)))
        for tensor in tensors:
            tensor.data = tensor.data.double()
        try:
            yield
        finally:
            for tensor, data in zip(tensors, before, strict=True):
                tensor.data = data


def _normalise_wide(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dtype: forward(x, torch.float32).to(dtype)


def _exact_attention(attend: Any, layer: Any, q: Any, k: Any, v: Any) -> Any:
    """``Attend.__call__`` on any dtype."""
    output = torch.zeros_like(q)
    starts = attend.starts.tolist()
    for begin, end in itertools.pairwise(starts):
        if end > begin:
            parts = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
            inside = F.scaled_dot_product_attention(
                parts[0], parts[1], parts[2], scale=layer.scale
            )
            output[begin:end] = inside[0].transpose(0, 1)
    return output.flatten(1)
