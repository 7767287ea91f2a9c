# SPDX-License-Identifier: Apache-2.0
"""Runs whole engines on a GPU with and without encoder graphs, in both runners.

    python benchmarks/engine_check.py --out DIR [--architectures NAME ...]

For each architecture and runner (V1, V2): greedy tokens of an engine without the
flag; then of one with it, which also sleeps, wakes up, has its weights reloaded
and its graphs cleared and captured again, with the tokens compared after each; and
the memory that it reports for its graphs against the memory that clearing them
gives back.  Each engine runs in a process of its own.

Memory is judged with ``--jobs 1``: other engines on the GPU would be counted.
``--only-graphs`` leaves out the engines without the flag, and compares with the
tokens before the first of those changes.
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

from vllm_encoder_cg.benchmarking.engine_options import shared_gpu_options
from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
    write_json,
)

MEMORY_TOLERANCE = 0.05
"""Of what is reported, how far it may be from what is given back."""


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
    parser.add_argument("--only-graphs", action="store_true")
    add_time_limit(parser)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        job = json.loads(args.engine)
        write_json(Path(job["output"]), run_engine(job))
        # vLLM's threads must not keep a finished process.
        sys.stdout.flush()
        os._exit(0)
    prepare_environment()
    args.out.mkdir(parents=True, exist_ok=True)
    attempts = Attempts(args.stop_after)
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
        for graphs in ((True,) if args.only_graphs else (False, True))
    ]
    found: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []

    def run_job(job: dict[str, Any]) -> None:
        """Several at a time: a row is written once both of its engines are done."""
        if not attempts.in_time():
            attempts.problems.append(f"{name_of(job)}: not begun, no time left")
            return
        found[name_of(job)] = start_engine(job)
        rows[:] = rows_of(found, only_graphs=args.only_graphs)
        write_json(args.out / "engines.json", rows)

    try:
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run_job, jobs))
    except SystemExit:  # asked to end, as were the engines: what there is is told
        attempts.problems.append("ended before all engines had run")
    for row in rows:
        if args.jobs == 1:
            row["problems"] += memory_problems(row.get("memory"))
        print(json.dumps(row), flush=True)
        attempts.problems += [f"{row['runner']}: {each}" for each in row["problems"]]
    write_json(args.out / "engines.json", rows)
    return attempts.finish(
        "; ".join(map(describe, rows)) or "no engine with graphs and one without ran"
    )


def name_of(job: dict[str, Any]) -> str:
    """Of one engine."""
    flag = "with graphs" if job["graphs"] else "without"
    return f"{job['architecture']}, {job['runner']}, {flag}"


def rows_of(
    found: dict[str, dict[str, Any]], *, only_graphs: bool
) -> list[dict[str, Any]]:
    """One row per engine with graphs, once the one without has run, too."""
    rows = []
    for given in list(found.values()):
        if given["job"]["graphs"]:
            without = name_of(given["job"] | {"graphs": False})
            if only_graphs or without in found:
                rows.append(compare(given if only_graphs else found[without], given))
    return rows


def memory_problems(memory: dict[str, float] | None) -> list[str]:
    """What is wrong with memory that is reported as `reported` and was `freed`."""
    if memory is None:
        return ["memory was not measured"]
    off = abs(memory["reported"] / max(memory["freed"], 1) - 1)
    if off <= MEMORY_TOLERANCE:
        return []
    return [f"graph memory is {off:.1%} off: {memory}"]


def describe(row: dict[str, Any]) -> str:
    """A few words."""
    if "stages" not in row:
        return f"{row['runner']} failed"
    text = f"{row['runner']}: {row['graph_hits']} hits, {len(row['stages'])} stages"
    if row["memory"]:
        reported, freed = row["memory"]["reported"], row["memory"]["freed"]
        text += f", {reported / 2**30:.2f} GiB reported, {freed / 2**30:.2f} given back"
    return f"{text}, started in {row['seconds']} s"


def start_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one engine in a process of its own; returns what it found."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(job["runner"] == "V2")),
    }
    output = Path(job["output"])
    output.unlink(missing_ok=True)
    found: dict[str, Any] = {"job": job, "error": None}
    command = [sys.executable, "-m", "benchmarks.engine_check", "--out", "."]
    with output.with_suffix(".log").open("w") as log:
        try:
            done = subprocess.run(
                [*command, "--engine", json.dumps(job)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=500,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return found | {"error": str(error)[-200:]}
    if output.exists():
        return found | json.loads(output.read_text())
    tail = output.with_suffix(".log").read_text()[-1500:]
    return found | {"error": f"exit code {done.returncode}: {tail}"}


def compare(without: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """One row: an engine with graphs beside the same without."""
    job = given["job"]
    errors = dict.fromkeys(each["error"] for each in (without, given))
    problems = [error for error in errors if error]
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
    with tempfile.TemporaryDirectory(prefix="engine-check-") as folder:
        arguments = engine_kwargs(name) | shared_gpu_options(graphs=job["graphs"])
        arguments |= {
            "model": str(write_checkpoint(name, Path(folder), vision=job["vision"])),
            "dtype": "bfloat16" if can_use_gpu() else "float32",
            "enable_prefix_caching": False,
            "mm_processor_cache_gb": 0,
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
