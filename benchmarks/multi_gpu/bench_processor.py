# SPDX-License-Identifier: Apache-2.0
"""``vllm bench mm-processor`` on several ranks: ours, in-tree, eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.mm_processor.output import find_problem, read_results
from benchmarks.multi_gpu.engines import (
    engine_args,
    make_checkpoint,
    make_environment,
)
from benchmarks.multi_gpu.processes import Job, run_jobs
from benchmarks.multi_gpu.results import Results, TimeLimit
from benchmarks.multi_gpu.timing import IN_TREE_BUDGETS, IN_TREE_ITEMS
from vllm_encoder_cg.benchmarking.engine_options import as_options
from vllm_encoder_cg.integration.environment import DISABLE


def bench_mm_processor(
    ranks: int,
    vision: str,
    backends: list[str],
    folder: Path,
    prompts: int,
    results: Results,
    limit: TimeLimit,
) -> None:
    """A row per backend and way; one engine after the other, as they are timed."""
    checkpoint = make_checkpoint(ranks, vision, folder)
    in_tree = {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": IN_TREE_BUDGETS[vision],
        "encoder_cudagraph_max_vision_items_per_batch": IN_TREE_ITEMS,
    }
    ways: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "ours": ({"cudagraph_mm_encoder": True}, {}),
        "in-tree": (in_tree, {DISABLE: "1"}),
        "eager": ({}, {}),
    }
    jobs, places = [], {}
    for backend in backends:
        for way, (graphs, environment) in ways.items():
            name = f"mm-processor, {backend}, {way}"
            output = folder / f"{backend}-{way}.json"
            options = _options(ranks, vision, graphs, prompts) | {
                "model": str(checkpoint),
                "mm_encoder_attn_backend": backend,
                "output_json": str(output),
            }
            program = ["-m", "vllm.entrypoints.cli.main", "bench", "mm-processor"]
            arguments = [*program, *as_options(options)]
            jobs.append(Job(name, arguments, make_environment() | environment))
            places[name] = (backend, way, output)
    for job, outcome in run_jobs(jobs, folder, limit):
        backend, way, output = places[job.name]
        problem = outcome.error or find_problem(way, outcome.log)
        if problem:
            results.add_problem("mm-processor", job.name, problem)
            continue
        measured = read_results(output, outcome.log)
        results.add(
            {
                "part": "mm-processor",
                "bench": f"mm-processor, {backend}",
                "ranks": ranks,
                "way": way,
                "requests": measured["prompts"],
                "mean_ms": measured["mean_encoder_forward_ms"],
                "p99_ms": measured["p99_encoder_forward_ms"],
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
        "limit_mm_per_prompt": {"image": count, "video": 0},
        "dataset_name": "random-mm",
        "num_prompts": prompts,
        "num_warmups": 5,
        "random_input_len": 8,
        "random_output_len": 2,
        "random_mm_base_items_per_request": count,
        "random_mm_num_mm_items_range_ratio": 0.0,
        "random_mm_limit_mm_per_prompt": {"image": count, "video": 0},
        "random_mm_bucket_config": f"{{({side}, {side}, 1): 1.0}}",
        "disable_tqdm": True,
    }
