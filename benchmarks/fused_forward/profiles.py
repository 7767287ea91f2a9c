# SPDX-License-Identifier: Apache-2.0
"""The kernels of a replay, by name and by kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.fused_forward.graphs import exact_graph
from vllm_encoder_cg.benchmarking.floor import exact_shape_graphs
from vllm_encoder_cg.manager import EncoderCudaGraphManager

_PROFILED_REPLAYS = 10

_KINDS = (
    ("rotary, q k v", ("rotate", "rotary")),
    ("residual, norm", ("add_norm", "layer_norm", "layernorm", "rms_norm", "rms")),
    ("scheduling", ("prepare_varlen",)),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("product", ("gemm", "nvjet", "cutlass", "gemv", "splitk", "cublas", "sm90_xmma")),
    ("activation", ("gelu", "activate", "silu", "act_and_mul", "sigmoid")),
    ("copy, fill", ("copy", "memcpy", "memset", "fill", "cat")),
)
"""What a part of a kernel's name says of it; the first that fits."""


def profiles(
    fused: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Kernels per replay of the floor and of the fused graph."""
    batch = fused.adapter.parse(mm_kwargs)
    assert batch is not None
    profiles = {}
    floor = exact_shape_graphs(fused.adapter, batch)
    if floor is not None:
        profiles["floor"] = _profile(floor[0])
    profiles["fused"] = _profile(exact_graph(fused, mm_kwargs))
    return profiles


def _profile(replay: Callable[[], Any]) -> list[dict[str, Any]]:
    """Name, launches and microseconds of each kernel, per replay."""
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED_REPLAYS):
            replay()
        torch.cuda.synchronize()
    rows = [
        {
            "kernel": event.key,
            "kind": _kind(event.key),
            "launches": event.count / _PROFILED_REPLAYS,
            "us": event.self_device_time_total / _PROFILED_REPLAYS,
        }
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _kind(name: str) -> str:
    lowered = name.lower()
    for kind, parts in _KINDS:
        if any(part in lowered for part in parts):
            return kind
    return "other"
