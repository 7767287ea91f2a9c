# SPDX-License-Identifier: Apache-2.0
"""``vllm bench mm-processor`` on several ranks: ours, in-tree, eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.mm_processor.engines import measure_in_turn, started
from benchmarks.mm_processor.workloads import random_images
from benchmarks.multi_gpu.engines import (
    engine_args,
    make_checkpoint,
    make_environment,
)
from benchmarks.multi_gpu.results import NOT_BEGUN, Results, TimeLimit
from benchmarks.multi_gpu.setup import IN_TREE_GRAPHS
from vllm_encoder_cg.benchmarking.engine_options import as_options
from vllm_encoder_cg.integration.environment import DISABLE


def bench_mm_processor(
    ranks: int,
    vision: str,
    backends: list[str],
    folder: Path,
    prompts: int,
    batched_tokens: int,
    results: Results,
    limit: TimeLimit,
) -> None:
    """A row per backend and way; the engines of a backend start together, since that
    takes most of the time, and are timed one after another."""
    checkpoint = make_checkpoint(ranks, vision, folder)
    graphs_on = {"cudagraph_mm_encoder": True}
    ways: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "ours": (graphs_on, {}),
        "in-tree": (graphs_on | IN_TREE_GRAPHS[vision], {DISABLE: "1"}),
        "eager": ({}, {}),
    }
    for backend in backends:
        names = {way: f"mm-processor, {backend}, {way}" for way in ways}
        if limit.is_up:
            for name in names.values():
                results.add_problem("mm-processor", name, NOT_BEGUN)
            continue
        of_backend = folder / backend
        commands, environments = {}, {}
        for way, (graphs, environment) in ways.items():
            options = _options(ranks, vision, graphs, prompts) | {
                "max_num_batched_tokens": batched_tokens,
                "model": str(checkpoint),
                "mm_encoder_attn_backend": backend,
                "output_json": str(of_backend / way / "results.json"),
            }
            commands[way] = ["bench", "mm-processor", *as_options(options)]
            environments[way] = make_environment() | environment
        with started(commands, environments, of_backend) as engines:
            for way, found in measure_in_turn(engines, lambda: limit.of_step):
                if isinstance(found, RuntimeError):
                    results.add_problem("mm-processor", names[way], str(found))
                    continue
                results.add(
                    {
                        "part": "mm-processor",
                        "bench": f"mm-processor, {backend}",
                        "ranks": ranks,
                        "way": way,
                        "requests": found["prompts"],
                        "max_num_batched_tokens": batched_tokens,
                        "mean_ms": found["mean_encoder_forward_ms"],
                        "p99_ms": found["p99_encoder_forward_ms"],
                    }
                )


def _options(
    ranks: int, vision: str, graphs: dict[str, Any], prompts: int
) -> dict[str, Any]:
    """The reference design's workload: 20 images of 336x336 per request."""
    count, side = (4, 128) if vision == "small" else (20, 336)
    return engine_args(vision, **graphs) | {
        "tensor_parallel_size": ranks,
        "mm_encoder_tp_mode": "data",
        **random_images(count, {(side, side): 1.0}),
        "num_prompts": prompts,
        "num_warmups": max(2, prompts // 10),
        "seed": 42,
        "disable_tqdm": True,
    }
