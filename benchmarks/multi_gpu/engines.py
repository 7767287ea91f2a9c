# SPDX-License-Identifier: Apache-2.0
"""Whole engines on several ranks: their tokens, and vLLM's own benchmark.

Each engine runs in a process of its own, so that it has its own environment and
gives its memory back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.multi_gpu.setup import QWEN3, Encoder, write_encoder

Row = dict[str, Any]

GRAPHS = {"compilation_config": {"cudagraph_mm_encoder": True}}
IN_TREE = {
    "compilation_config": {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": [512 * n for n in range(1, 9)] + [4864],
        "encoder_cudagraph_max_vision_items_per_batch": 8,
    }
}
_LAYERS = 8
"""Of the text model: the first of two stages has room for the deepstack levels."""


@dataclass(frozen=True)
class Job:
    """One engine."""

    name: str
    engine_args: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


class GraphStats:
    """Adds a method to vLLM's workers, as their ``worker_extension_cls``."""

    model_runner: Any

    def encoder_graph_stats(self) -> dict[str, Any] | None:
        """What the manager of this rank counted; None: it has none."""
        from vllm_encoder_cg.integration.runners import find_manager

        manager = find_manager(self.model_runner)
        if manager is None:
            return None
        stats = manager.get_cumulative_stats()
        return {name: stats[name] for name in ("graph_hits", "items", "num_budgets")}


def compare_tokens(ranks: int, vision: str, folder: Path) -> list[Row]:
    """Greedy tokens of engines with graphs against those without.

    Tensor parallel with both modes, then pipeline parallel, with both runners of
    vLLM where the platform has both.
    """
    checkpoint = make_checkpoint(ranks, vision, folder)
    layouts = _layouts(ranks)
    pairs = []
    for runner, environment in _runners().items():
        for name, parallel in layouts.items():
            args = engine_args(vision) | {"model": str(checkpoint)} | parallel
            jobs = (
                Job(f"{runner}, {name}, eager", args, environment),
                Job(f"{runner}, {name}", args | GRAPHS, environment),
            )
            pairs.append((*jobs, "pipeline_parallel_size" in parallel))
    # On GPUs their starts, which take most of the time, may overlap.
    with ThreadPoolExecutor(1 if vision == "small" else 4) as pool:
        found = {
            job.name: pool.submit(run, job, folder)
            for *jobs, _ in pairs
            for job in jobs
        }
    return [
        _compare_engines(given.name, ranks, found[without.name], found[given.name], pp)
        for without, given, pp in pairs
    ]


def _compare_engines(
    name: str,
    ranks: int,
    without: Future[dict[str, Any]],
    given: Future[dict[str, Any]],
    stages: bool,
) -> Row:
    """One engine's tokens and graphs."""
    row: Row = {"engine": name, "ranks": ranks}
    for future in (without, given):
        if error := future.exception():
            return row | {"part": name, "problems": [str(error)[-1500:]]}
    row["equal_tokens"] = without.result()["tokens"] == given.result()["tokens"]
    for field_, count in (("graphs", "num_budgets"), ("hits", "graph_hits")):
        row[f"{field_}_by_rank"] = [
            stats[count] if stats else 0 for stats in given.result()["stats"]
        ]
    row["problems"] = _find_problems(row, stages)
    return row


def _find_problems(row: Row, stages: bool) -> list[str]:
    """What is wrong with an engine's graphs."""
    first, *others = (graphs > 0 for graphs in row["graphs_by_rank"])
    problems = []
    if not first or not any(row["hits_by_rank"]):
        problems.append("no graphs, or none was replayed")
    if stages and any(others):
        problems.append("a stage that encodes nothing has graphs")
    if not stages and not all(others):
        problems.append("a rank has no graphs")
    return problems


def bench_mm_processor(
    ranks: int, vision: str, backends: list[str], folder: Path, prompts: int
) -> list[Row]:
    """``vllm bench mm-processor``: eager, in-tree, ours; per backend."""
    from vllm_encoder_cg.integration.environment import DISABLE

    checkpoint = make_checkpoint(ranks, vision, folder)
    count, side = (4, 128) if vision == "small" else (20, 336)
    ways: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "eager": ({}, {}),
        "in-tree": (IN_TREE, {DISABLE: "1"}),
        "ours": (GRAPHS, {}),
    }
    rows = []
    for backend in backends:
        for way, (args, environment) in ways.items():
            output = folder / f"mm-processor-{backend}-{way}.json"
            options = {
                **engine_args(vision),
                **args,
                "model": str(checkpoint),
                "tensor_parallel_size": ranks,
                "mm_encoder_tp_mode": "data",
                "mm_encoder_attn_backend": backend,
                "limit_mm_per_prompt": {"image": count, "video": 0},
                "num_prompts": prompts,
                "num_warmups": 5,
                "random_input_len": 8,
                "output_len": 2,
                "random_mm_base_items_per_request": count,
                "random_mm_num_mm_items_range_ratio": 0.0,
                "random_mm_limit_mm_per_prompt": {"image": count, "video": 0},
                "random_mm_bucket_config": f"{{({side}, {side}, 1): 1.0}}",
                "output_json": str(output),
                "disable_tqdm": True,
            }
            command = ["-m", "vllm.entrypoints.cli.main", "bench", "mm-processor"]
            _call([*command, *_as_options(options)], environment)
            stages = json.loads(output.read_text())["mm_processor_stats"]
            forward = stages["encoder_forward_ms"]
            rows.append(
                {
                    "bench": f"mm-processor, {backend}",
                    "ranks": ranks,
                    "way": way,
                    "mean_ms": forward["mean"],
                    "p99_ms": forward.get("p99") or forward.get("p99.0"),
                }
            )
    return rows


def make_checkpoint(ranks: int, vision: str, folder: Path) -> Path:
    """A Qwen3-VL whose text model splits over ranks and over stages."""
    path = write_encoder(Encoder(QWEN3, "data", vision), ranks, folder)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = _LAYERS
    (path / "config.json").write_text(json.dumps(config))
    return path


def engine_args(vision: str) -> dict[str, Any]:
    """For every engine, beside its layout and graphs."""
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs

    small = vision == "small"
    return engine_kwargs(QWEN3) | {
        "dtype": "float32" if small else "bfloat16",
        "max_model_len": 1024 if small else 8192,
        "max_num_batched_tokens": 512 if small else 8192,
        "limit_mm_per_prompt": {"image": 5 if small else 20, "video": 0},
        "additional_config": {"encoder_cg": {"max_graphs": 6}} if small else {},
        "enable_prefix_caching": False,
        # On a GPU this would turn graphs off; on the CPU it saves a compilation.
        "enforce_eager": small,
        # Engines run beside each other: none may size itself by what is free.
        "gpu_memory_utilization": 0.5 if small else 0.15,
        **({} if small else {"kv_cache_memory_bytes": 2 << 30}),
        "seed": 0,
    }


def _runners() -> dict[str, dict[str, str]]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {"V1": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    return {f"V{1 + new}": {"VLLM_USE_V2_MODEL_RUNNER": str(new)} for new in range(2)}


def _layouts(ranks: int) -> dict[str, dict[str, Any]]:
    tensor = {"tensor_parallel_size": ranks}
    layouts = {
        f"tensor parallel, {mode}": tensor | {"mm_encoder_tp_mode": mode}
        for mode in ("data", "weights")
    }
    if ranks > 1:
        # With enforce_eager, vLLM's later stages on a CPU lack what a warm-up makes.
        layouts["pipeline parallel"] = {
            "pipeline_parallel_size": ranks,
            "enforce_eager": False,
        }
    return layouts


def run(job: Job, folder: Path) -> dict[str, Any]:
    """What ``generate`` returns in a process of its own."""
    output = folder / f"{job.name}.json"
    arguments = ["-m", "benchmarks.multi_gpu.engines", json.dumps(job.engine_args)]
    _call([*arguments, str(output)], job.environment)
    return json.loads(output.read_text())


def _call(arguments: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        output = done.stdout + done.stderr
        raise RuntimeError(f"{' '.join(arguments)}\n{output[-6000:]}")


def _as_options(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [option, text]
    return words


def generate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Starts an engine in this process and asks it about random images."""
    from vllm import LLM, SamplingParams

    from vllm_encoder_cg.samples.checkpoints import prompt
    from vllm_encoder_cg.samples.media import random_image

    llm = LLM(
        **arguments, worker_extension_cls="benchmarks.multi_gpu.engines.GraphStats"
    )
    small = arguments["dtype"] == "float32"
    side = 64 if small else 336
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    tokens = []
    for count in (1, 2, 5 if small else 20):
        image = [random_image(side + 32 * i, side, seed=i) for i in range(count)]
        request = {
            "prompt": prompt(QWEN3, images=count),
            "multi_modal_data": {"image": image},
        }
        output = llm.generate([request], sampling, use_tqdm=False)[0]
        tokens.append(list(output.outputs[0].token_ids))
    return {"tokens": tokens, "stats": llm.collective_rpc("encoder_graph_stats")}


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    Path(sys.argv[2]).write_text(json.dumps(generate(json.loads(sys.argv[1]))))
