# SPDX-License-Identifier: Apache-2.0
"""Runs whole engines on a GPU with and without encoder graphs, in both runners.

    python benchmarks/engine_check.py --out DIR [--architectures NAME ...]

For each architecture and runner (V1, V2): greedy tokens of an engine without the
flag; then of one with it, which also sleeps, wakes up, has its weights reloaded
and its graphs cleared and captured again, with the tokens compared after each; and
the memory that it reports for its graphs against the memory that clearing them
gives back.  Each engine runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COMPILATION = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4],
}
"""Keeps the start short; the text model is not what is checked."""


class EncoderChecks:
    """Adds methods to vLLM's workers, as their ``worker_extension_cls``."""

    model_runner: Any
    reload_weights: Any

    def encoder_stats(self) -> dict[str, Any]:
        """The manager's statistics, plain enough for any transport."""
        from vllm_encoder_cg.integration.runners import find_manager

        manager = find_manager(self.model_runner)
        if manager is None:
            return {}
        stats = manager.get_cumulative_stats()
        return json.loads(json.dumps(stats, default=str))

    def encoder_memory_given_back(self) -> dict[str, float]:
        """Bytes that the manager reports, and bytes that ``clear()`` frees."""
        import gc

        import torch

        from vllm_encoder_cg.integration.runners import find_manager

        manager = find_manager(self.model_runner)
        reported = manager.get_cumulative_stats()["graph_memory_bytes"]
        # Only what graphs hold may come back: first give back what is cached.
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        manager.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return {
            "reported": reported,
            "freed": torch.cuda.mem_get_info()[0] - before,
        }

    def save_weights(self, path: str) -> None:
        """Every parameter, under the model's own names."""
        from safetensors.torch import save_file

        parameters = self.model_runner.get_model().named_parameters()
        save_file(
            {name: each.detach().cpu().clone() for name, each in parameters}, path
        )

    def load_saved_weights(self, path: str) -> None:
        """Reloads in place, as vLLM does for weights from a trainer."""
        import torch
        from safetensors.torch import load_file

        weights = iter(load_file(path).items())
        with torch.no_grad():
            self.reload_weights(weights_iterator=weights, is_checkpoint_format=False)

    def encoder_capture_again(self) -> int:
        """Captures anew, as vLLM does; returns the number of graphs."""
        import torch
        from vllm.distributed.parallel_state import graph_capture

        from vllm_encoder_cg.integration.runners import find_manager

        manager = find_manager(self.model_runner)
        with torch.inference_mode(), graph_capture(device=manager.device):
            manager.capture(torch.cuda.graph_pool_handle())
        return int(manager.get_cumulative_stats()["num_budgets"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--architectures", nargs="+", default=["Qwen3VLForConditionalGeneration"]
    )
    parser.add_argument("--runners", nargs="+", default=["V1", "V2"])
    parser.add_argument("--backend", default=None)
    parser.add_argument("--vision", choices=("small", "released"), default="released")
    parser.add_argument("--jobs", type=int, default=4, help="engines at a time")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.engine:
        job = json.loads(args.engine)
        Path(job["output"]).write_text(json.dumps(run_engine(job)))
        # vLLM's threads must not keep a finished process.
        sys.stdout.flush()
        os._exit(0)
    jobs = [
        {
            "architecture": architecture,
            "runner": runner,
            "graphs": graphs,
            "backend": args.backend,
            "vision": args.vision,
            "output": str(args.out / f"{architecture}-{runner}-{graphs}.json"),
        }
        for architecture in args.architectures
        for runner in args.runners
        for graphs in (False, True)
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(start_engine, jobs))
    rows = [
        compare(without, given)
        for without, given in zip(found[::2], found[1::2], strict=True)
    ]
    (args.out / "engines.json").write_text(json.dumps(rows, indent=1))
    for row in rows:
        print(json.dumps(row), flush=True)
    return int(any(row["problems"] for row in rows))


def start_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one engine in a process of its own; returns what it found."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(job["runner"] == "V2")),
    }
    output = Path(job["output"])
    with output.with_suffix(".log").open("w") as log:
        done = subprocess.run(
            [
                sys.executable,
                __file__,
                "--out",
                str(output.parent),
                "--engine",
                json.dumps(job),
            ],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=500,
            check=False,
        )
    found: dict[str, Any] = {"job": job, "error": None}
    if output.exists():
        return found | json.loads(output.read_text())
    tail = output.with_suffix(".log").read_text()[-1500:]
    return found | {"error": f"exit code {done.returncode}: {tail}"}


def compare(without: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """One row: an engine with graphs beside the same without."""
    job = given["job"]
    problems = [each["error"] for each in (without, given) if each["error"]]
    row: dict[str, Any] = {
        "architecture": job["architecture"],
        "runner": job["runner"],
        "problems": problems,
    }
    if problems:
        return row
    for stage, tokens in given["tokens"].items():
        if tokens != without["tokens"]["first"]:
            equal = sum(a == b for a, b in zip(tokens, without["tokens"]["first"]))  # noqa: B905
            problems.append(f"{stage}: {equal} of {len(tokens)} prompts equal")
    if not given["stats"].get("graph_hits"):
        problems.append("no item was encoded by graph")
    row |= {k: given[k] for k in ("seconds", "memory", "stages")}
    row |= {k: given["stats"].get(k) for k in ("graph_hits", "graph_misses")}
    return row


def can_use_gpu() -> bool:
    """Whether vLLM runs on CUDA here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def can_sleep() -> bool:
    """Whether this vLLM can put an engine to sleep on this machine."""
    from vllm.device_allocator.cumem import cumem_available

    return bool(cumem_available and can_use_gpu())


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Everything that one engine is asked to do."""
    from vllm import LLM, SamplingParams

    from vllm_encoder_cg.samples.checkpoints import (
        ARCHITECTURES,
        engine_kwargs,
        prompt,
        write_checkpoint,
    )
    from vllm_encoder_cg.samples.media import random_image

    name = job["architecture"]
    compilation = COMPILATION | {"cudagraph_mm_encoder": job["graphs"]}
    with tempfile.TemporaryDirectory(prefix="engine-check-") as folder:
        arguments = engine_kwargs(name) | {
            "model": str(write_checkpoint(name, Path(folder), vision=job["vision"])),
            "dtype": "bfloat16" if can_use_gpu() else "float32",
            "compilation_config": compilation,
            "enable_prefix_caching": False,
            "mm_processor_cache_gb": 0,
            # Engines run beside each other: none may size itself by what is free.
            "kv_cache_memory_bytes": 2 << 30,
            "gpu_memory_utilization": 0.15,
            "seed": 0,
        }
        if job["backend"]:
            arguments["mm_encoder_attn_backend"] = job["backend"]
        if job["graphs"]:
            arguments["enable_sleep_mode"] = can_sleep()
        begin = time.perf_counter()
        llm = LLM(
            **arguments,
            worker_extension_cls="benchmarks.engine_check.EncoderChecks",
        )
        seconds = time.perf_counter() - begin
        sizes = [(336, 336), (640, 480), (512, 768), (896, 448)]
        requests = [
            {
                "prompt": prompt(name, images=count),
                "multi_modal_data": {
                    "image": [random_image(w, h, seed=i) for i, (w, h) in picked]
                },
            }
            for count in (1, 2, 4)
            for picked in [list(enumerate(sizes))[:count]]
        ]
        if "video" in ARCHITECTURES[name].modalities:
            from vllm_encoder_cg.samples.media import make_video

            requests.append(
                {
                    "prompt": prompt(name, videos=1),
                    "multi_modal_data": {"video": make_video(8, 224, 224, seed=9)},
                }
            )
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

        def generate() -> list[list[int]]:
            llm.llm_engine.reset_encoder_cache()
            outputs = llm.generate(requests, sampling, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        found: dict[str, Any] = {"tokens": {"first": generate()}}
        found["seconds"] = round(seconds, 1)
        if not job["graphs"]:
            return found
        found["stats"] = llm.collective_rpc("encoder_stats")[0]
        found["stages"] = {}
        found["memory"] = None

        def stage(title: str, change: Any) -> None:
            try:
                result = change()
                before = llm.collective_rpc("encoder_stats")[0]
                found["tokens"][title] = generate()
                after = llm.collective_rpc("encoder_stats")[0]
                hits = after["graph_hits"] - before["graph_hits"]
                found["stages"][title] = f"{hits} hits"
                if title == "cleared":
                    found["memory"] = result
            except Exception as error:
                found["stages"][title] = f"{type(error).__name__}: {error}"[:300]
                found["tokens"][title] = []

        weights = str(Path(folder) / "weights.safetensors")
        llm.collective_rpc("save_weights", args=(weights,))

        def reload() -> None:
            llm.collective_rpc("load_saved_weights", args=(weights,))

        def sleep(level: int) -> None:
            llm.sleep(level)
            llm.wake_up()
            if level == 2:
                reload()

        stage("again", lambda: None)
        stage("reloaded", reload)
        if arguments["enable_sleep_mode"]:
            stage("slept", lambda: sleep(1))
            stage("slept at level 2", lambda: sleep(2))
        stage("cleared", lambda: llm.collective_rpc("encoder_memory_given_back")[0])
        stage("captured again", lambda: llm.collective_rpc("encoder_capture_again")[0])
        return found


if __name__ == "__main__":
    sys.exit(main())
