# SPDX-License-Identifier: Apache-2.0
"""Times one encoder four ways on the same batches: eager, vLLM's in-tree graph
manager, this project's, and the floor.

The floor is a CUDA graph of vLLM's own forward captured for exactly one batch
and replayed with nothing around it; no budgeted replay of that forward can be
faster.  All ways are timed in turn within each round, so that clock drift hits
them alike; figures are medians over rounds, and only their ratios mean
anything.  Needs a GPU.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass
class CaseTimes:
    """Medians of one case, in ms."""

    case: str
    items: int
    tokens: int
    median_ms: dict[str, float]
    p99_ms: dict[str, float] = field(default_factory=dict)

    def ratio(self, way: str, to: str) -> float:
        return self.median_ms[way] / self.median_ms[to]


def time_in_turn(
    calls: Mapping[str, Call], rounds: int = 30, warmup: int = 5
) -> dict[str, list[float]]:
    """Milliseconds per call, each call synchronised before and after."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(warmup):
            call()
    gc.collect()
    gc.disable()
    try:
        names = list(calls)
        for round_ in range(rounds):
            # Each in turn begins, since a call finds the clocks and caches that
            # the one before it left.
            first = round_ % len(names)
            for name in names[first:] + names[:first]:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                calls[name]()
                torch.cuda.synchronize()
                times[name].append((time.perf_counter() - begin) * 1e3)
    finally:
        gc.enable()
    return times


def exact_shape_graph(model: Any, mm_kwargs: dict[str, Any], items: int) -> Call | None:
    """Captures vLLM's own forward for exactly this batch.

    Returns None for a model without vLLM's protocol.  Only benchmarks use that
    protocol of a model that has an adapter.
    """
    if not hasattr(model, "prepare_encoder_cudagraph_replay_buffers"):
        return None
    frames = 0
    for name in ("image_grid_thw", "video_grid_thw"):
        if name in mm_kwargs:
            frames = int(mm_kwargs[name][:, 0].sum())
    values = model.prepare_encoder_cudagraph_replay_buffers(
        mm_kwargs, items, max(frames, items)
    ).values
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(2):
            model.encoder_cudagraph_forward({**values})
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            output = model.encoder_cudagraph_forward({**values})
    torch.cuda.synchronize()

    def replay(keep: Any = (values, output)) -> None:
        graph.replay()

    return replay


def compare_case(
    name: str,
    model: Any,
    mm_kwargs: dict[str, Any],
    items: int,
    tokens: int,
    managers: Mapping[str, Any],
    rounds: int = 30,
) -> CaseTimes:
    """Times eager, every manager and the floor on one batch."""

    @torch.inference_mode()
    def eager() -> Any:
        return model.embed_multimodal(**mm_kwargs)

    def through(manager: Any) -> Call:
        @torch.inference_mode()
        def call() -> Any:
            result = manager.execute(mm_kwargs)
            return result if result is not None else eager()

        return call

    calls: dict[str, Call] = {"eager": eager}
    calls |= {way: through(manager) for way, manager in managers.items()}
    floor = exact_shape_graph(model, mm_kwargs, items)
    if floor is not None:
        calls["floor"] = floor
    times = time_in_turn(calls, rounds)
    del floor
    return CaseTimes(
        name,
        items,
        tokens,
        {way: statistics.median(values) for way, values in times.items()},
        {
            way: statistics.quantiles(values, n=100, method="inclusive")[98]
            for way, values in times.items()
        },
    )


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)


def markdown_table(rows: Sequence[CaseTimes], ours: str = "ours") -> str:
    """The cases with all ways and our ratios."""
    ways = list(rows[0].median_ms)
    ratios = [way for way in ways if way != ours]
    lines = [
        "| case | tokens | "
        + " | ".join(f"{way} (ms)" for way in ways)
        + " | "
        + " | ".join(f"{ours} / {way}" for way in ratios)
        + " |",
        "|---" * (2 + len(ways) + len(ratios)) + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row.case} | {row.tokens} | "
            + " | ".join(f"{row.median_ms[way]:.2f}" for way in ways)
            + " | "
            + " | ".join(f"{row.ratio(ours, way):.3f}" for way in ratios)
            + " |"
        )
    for label, pick in (("worst", max), ("geometric mean", geometric_mean)):
        lines.append(
            f"| {label} | | "
            + " | ".join("" for _ in ways)
            + " | "
            + " | ".join(
                f"{pick([row.ratio(ours, way) for row in rows]):.3f}" for way in ratios
            )
            + " |"
        )
    return "\n".join(lines)
