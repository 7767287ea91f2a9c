# SPDX-License-Identifier: Apache-2.0
"""Runs the parts, within a time, and prints what is wrong last.

::

    python -m benchmarks.multi_gpu --ranks 4 --output results

Every result is in the output folder, and printed, as soon as there is one.  What fails,
takes too long or could not be begun is named there, and the exit code is 1.

Without GPUs, ``--vision small`` runs the same on the CPU over gloo.  With fewer GPUs
than ranks, part correctness alone runs, with ranks that share them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.multi_gpu.results import (
    NOT_BEGUN,
    Results,
    TimeLimit,
    describe,
    is_wrong,
)
from benchmarks.multi_gpu.setup import ARCHITECTURES, QWEN3, Encoder
from benchmarks.multi_gpu.tokens import LAYOUTS
from vllm_encoder_cg.benchmarking.scripts import prepare_environment, verdict_line

PARTS = ("correctness", "timing", "mm-processor", "tokens")
MODES = ("data", "weights")
BATCHED_TOKENS = {"released": 16384, "small": 512}
"""vLLM's default for its benchmarks on such a GPU (for ``vllm serve`` it is 8192), and
what fits the small model."""

# vLLM has further all-reduces, which need NVLink multicast: not every machine, and no
# virtual one, can share it.  All ways are compared without.
ENVIRONMENT = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multi_gpu")
    add = parser.add_argument
    add("--ranks", type=int, default=0, help="GPUs to use (default: all)")
    add("--output", type=Path, default=Path("multi-gpu"), help="folder of the results")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--vision", choices=("released", "small"), default="released")
    add("--architectures", nargs="+", default=list(ARCHITECTURES))
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--backends", nargs="+", default=["FLASH_ATTN", "FLASHINFER"])
    add("--batches", type=int, default=50, help="random batches, or prompts")
    batched = "vLLM's max_num_batched_tokens, in part mm-processor"
    add("--batched-tokens", type=int, default=0, help=f"{batched} (default: vLLM's)")
    add("--rounds", type=int, default=200, help="timed requests per way")
    add("--layouts", nargs="+", choices=LAYOUTS, default=[], help="default: all")
    add("--jobs", type=int, default=0, help="engines at once, in part tokens")
    limit = ("--limit-s", "--stop-after")
    add(*limit, type=float, default=3600, help="seconds for all parts together")
    add("--step-limit-s", type=float, default=300, help="for each start of ranks")
    options = parser.parse_args(arguments)
    for name in ("ranks", "batches", "batched_tokens", "jobs"):
        if getattr(options, name) < 0:
            value = getattr(options, name)
            option = name.replace("_", "-")
            parser.error(f"--{option}: got {value}; use a positive number")
    if options.rounds < 2:
        parser.error(f"--rounds: got {options.rounds}; use at least 2")
    for name in ("limit_s", "step_limit_s"):
        if not getattr(options, name) > 0:
            value = getattr(options, name)
            option = name.replace("_", "-")
            parser.error(f"--{option}: got {value}; use a positive number")
    return options


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    limit = TimeLimit(options.limit_s, options.step_limit_s)
    gpus = count_gpus()
    ranks = options.ranks or gpus or 2
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(options.output / f"multi-gpu-{ranks}.jsonl")
    results.path.write_text("")
    for part in options.parts:
        if limit.is_up:
            results.add_problem(part, "all of it", NOT_BEGUN)
            continue
        if 0 < gpus < ranks and part != "correctness":
            # Ranks that share a GPU wait for each other's turn.
            results.add_problem(part, "all of it", f"needs {ranks} GPUs, not {gpus}")
            continue
        try:
            run_part(part, ranks, options, results, limit)
        except SystemExit:  # asked to end: what there is is still told
            results.add_problem(part, "the rest", "ended")
            break
        except Exception as error:
            # The other parts may still show something.
            problem = f"{type(error).__name__}: {str(error)[-3000:]}"
            results.add_problem(part, "the rest", problem)
        print(f"{part}: {limit.seconds - limit.left:.0f} s since start", flush=True)
    return report(results, options.parts)


def report(results: Results, parts: list[str]) -> int:
    """Prints what is wrong and how many results there are; the exit code."""
    rows = results.rows()
    counts = Counter(row["part"] for row in rows)
    problems = [describe(row) for row in rows if is_wrong(row)]
    problems += [f"{part}: no result" for part in parts if not counts[part]]
    print("\n".join(problem[:300] for problem in problems))
    print(verdict_line(", ".join(f"{counts[p]} of {p}" for p in parts), problems))
    return int(bool(problems))


def run_part(
    part: str,
    ranks: int,
    options: argparse.Namespace,
    results: Results,
    limit: TimeLimit,
) -> None:
    """Adds the rows of one part."""
    if part == "correctness":
        from benchmarks.multi_gpu.correctness import check

        for name in options.architectures:
            encoders = [Encoder(name, mode, options.vision) for mode in options.modes]
            if limit.is_up:
                results.add_problem(part, name, NOT_BEGUN)
                continue
            try:
                check(encoders, ranks, options.batches, results, limit)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[-3000:]}"
                results.add_problem(part, name, problem)
        return
    if part == "timing":
        from benchmarks.multi_gpu.timing import time_encoders

        encoders = [
            Encoder(QWEN3, mode, options.vision, backend, videos=False)
            for mode in options.modes
            for backend in options.backends
        ]
        time_encoders(encoders, ranks, options.rounds, results, limit)
        return
    with tempfile.TemporaryDirectory(prefix="multi-gpu-") as name:
        folder = Path(name)
        if part == "tokens":
            from benchmarks.multi_gpu.tokens import compare_tokens

            # On GPUs their starts, which take most of the time, may overlap.
            at_once = options.jobs or (1 if options.vision == "small" else 4)
            compare_tokens(
                ranks,
                options.vision,
                folder,
                results,
                limit,
                at_once,
                options.layouts,
            )
            return
        from benchmarks.multi_gpu.bench_processor import bench_mm_processor

        bench_mm_processor(
            ranks,
            options.vision,
            options.backends,
            folder,
            options.batches,
            options.batched_tokens or BATCHED_TOKENS[options.vision],
            results,
            limit,
        )


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main())
