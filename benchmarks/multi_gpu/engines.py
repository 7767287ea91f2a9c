# SPDX-License-Identifier: Apache-2.0
"""Whole engines on several ranks, each in a process of its own, so that it has its
own environment and gives its memory back.

Run as a program, it starts one engine and asks it about random images.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.multi_gpu.processes import Job
from benchmarks.multi_gpu.setup import QWEN3, Encoder, write_encoder
from vllm_encoder_cg.benchmarking.engine_options import shared_gpu_options

_LAYERS = 8
"""Of the text model: the first of two stages has room for the deepstack levels."""


class GraphControl:
    """Adds methods to vLLM's workers, as their ``worker_extension_cls``."""

    model_runner: Any

    def encoder_graph_stats(self) -> dict[str, Any] | None:
        """What the manager of this rank counted; None: it has none."""
        manager = self._manager()
        if manager is None:
            return None
        stats = manager.get_cumulative_stats()
        return {name: stats[name] for name in ("graph_hits", "items", "num_budgets")}

    def set_encoder_graphs_aside(self) -> None:
        """Leaves every further batch to vLLM's own path."""
        manager = self._manager()
        if manager is not None:
            manager.execute = lambda mm_kwargs: None

    def _manager(self) -> Any:
        from vllm_encoder_cg.integration.runners import find_manager

        return find_manager(self.model_runner)


def make_checkpoint(ranks: int, vision: str, folder: Path) -> Path:
    """A Qwen3-VL whose text model splits over ranks and over two stages."""
    path = write_encoder(Encoder(QWEN3, "data", vision), ranks, folder)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = _LAYERS
    (path / "config.json").write_text(json.dumps(config))
    return path


def engine_args(vision: str, **graphs: Any) -> dict[str, Any]:
    """For every engine, beside its layout.

    Args:
        graphs: fields of ``compilation_config``.
    """
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs

    small = vision == "small"
    options = engine_kwargs(QWEN3) | {
        "dtype": "float32" if small else "bfloat16",
        "max_model_len": 1024 if small else 8192,
        "max_num_batched_tokens": 512 if small else 8192,
        "limit_mm_per_prompt": {"image": 5 if small else 20, "video": 0},
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "seed": 0,
    }
    if small:
        return options | {
            "additional_config": {"encoder_cg": {"max_graphs": 6}},
            "compilation_config": graphs,
            # On a GPU this would turn graphs off; on the CPU it saves a compilation.
            "enforce_eager": True,
            # Beside others: no engine may size itself by what is free.
            "kv_cache_memory_bytes": 1 << 30,
            "gpu_memory_utilization": 0.15,
        }
    options |= shared_gpu_options(graphs=bool(graphs))
    options["compilation_config"] |= graphs
    return options


def make_environment() -> dict[str, str]:
    """For every engine."""
    from vllm.platforms import current_platform

    # One process less to start; what is timed is timed in the ranks' own.
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Whose graphs are active is read in the log.
        "VLLM_LOGGING_LEVEL": "INFO",
        # With Ray, each its own cluster, or one would end with another's.
        "RAY_ADDRESS": "local",
    }
    if current_platform.is_cpu():
        # Ranks on any number of cores.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return environment


def make_job(
    name: str, arguments: dict[str, Any], environment: dict[str, str], output: Path
) -> Job:
    """What ``generate`` returns, written to `output`.

    Args:
        environment: beside that of every engine.
    """
    program = ["-m", "benchmarks.multi_gpu.engines", json.dumps(arguments), str(output)]
    return Job(name, program, make_environment() | environment)


def generate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Starts an engine in this process and asks it about random images, twice if it
    has graphs: with them, then without."""
    from vllm import LLM, SamplingParams

    from vllm_encoder_cg.samples.checkpoints import prompt
    from vllm_encoder_cg.samples.media import random_image

    llm = LLM(
        **arguments, worker_extension_cls="benchmarks.multi_gpu.engines.GraphControl"
    )
    small = arguments["dtype"] == "float32"
    side = 64 if small else 336
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    requests = [
        {
            "prompt": prompt(QWEN3, images=count),
            "multi_modal_data": {
                # No image twice: the engine keeps what it has encoded.
                "image": [
                    random_image(side + 32 * (i % 4), side, seed=100 * count + i)
                    for i in range(count)
                ]
            },
        }
        for count in (1, 2, 3, 5 if small else 20)
    ]

    def ask() -> list[list[int]]:
        llm.llm_engine.reset_encoder_cache()
        outputs = [llm.generate([r], sampling, use_tqdm=False)[0] for r in requests]
        return [list(output.outputs[0].token_ids) for output in outputs]

    found: dict[str, Any] = {"tokens": ask()}
    found["stats"] = llm.collective_rpc("encoder_graph_stats")
    if any(found["stats"]):
        llm.collective_rpc("set_encoder_graphs_aside")
        found["tokens_of_own_path"] = ask()
        after = llm.collective_rpc("encoder_graph_stats")
        assert after == found["stats"], "graphs were used though set aside"
    return found


def main() -> None:
    arguments, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    output.write_text(json.dumps(generate(arguments)))
    sys.stdout.flush()
    # Threads of vLLM must not keep a finished process; its workers are ended with
    # the session.
    os._exit(0)


if __name__ == "__main__":
    main()
