# SPDX-License-Identifier: Apache-2.0
"""Runs ``vllm bench mm-processor`` on one GPU: eager, in-tree and ours.

    python -m benchmarks.mm_processor --out DIR [--workloads NAME ...]

A Qwen3-VL with the released vision configuration, random weights and a small text
model; images are random.  Workloads:

- ``mixed``: one image per prompt, half 480x640 and half 336x336;
- ``wide``: one to four images per prompt, from 224x224 to 1920x1080;
- ``twenty``: 20 images of 336x336 per prompt; in-tree has the budgets of vLLM's
  published figures for several GPUs, here on one.

Each way is an engine of its own.  Those of a workload start together, since that
takes most of the time, and are then timed one after another, while the others wait
without work (``--one-by-one``: they also start so).  DIR receives ``summary.json``
with flat records, as ``vllm bench sweep plot`` reads them, a table (README.md), and
the engines' logs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.mm_processor.engines import measure_in_turn, started
from benchmarks.mm_processor.tables import describe, markdown, verdict
from benchmarks.mm_processor.workloads import (
    ARCHITECTURE,
    WAYS,
    WORKLOADS,
    command_line,
)
from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
    write_json,
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mm_processor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    add("--backends", nargs="+", default=["FLASH_ATTN"])
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    add("--vision", default="released", choices=("released", "small"))
    add("--prompts", type=int, help="instead of the workload's number")
    add("--one-by-one", action="store_true", help="engines start one after another")
    add("--timeout", type=float, default=300.0, help="seconds per start, and per run")
    add_time_limit(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    prepare_environment()
    from vllm_encoder_cg.samples.checkpoints import write_checkpoint

    args.out.mkdir(parents=True, exist_ok=True)
    attempts = Attempts(args.stop_after)
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        print(describe(record), flush=True)
        write_json(args.out / "summary.json", records)
        command = shlex.join(["python", "-m", "benchmarks.mm_processor", *sys.argv[1:]])
        text = f"```\n{command}\n```\n\n{markdown(records)}\n"
        (args.out / "README.md").write_text(text)

    groups = [[way] for way in args.ways] if args.one_by_one else [list(args.ways)]
    with tempfile.TemporaryDirectory(prefix="mm-processor-") as folder:
        checkpoint = write_checkpoint(ARCHITECTURE, Path(folder), vision=args.vision)
        for name in args.workloads:
            for backend in args.backends:
                for ways in groups:
                    attempts.run(
                        f"{name}, {backend}, {', '.join(ways)}",
                        lambda n=name, b=backend, w=ways: run(  # type: ignore[misc]
                            n, b, w, checkpoint, args, attempts, keep
                        ),
                    )
    print(markdown(records))
    return attempts.finish(verdict(records))


def run(
    name: str,
    backend: str,
    ways: list[str],
    checkpoint: Path,
    args: argparse.Namespace,
    attempts: Attempts,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """One workload, all `ways`; a way that fails does not end the others."""
    from vllm_encoder_cg.integration.environment import DISABLE

    folder = args.out / f"{name}-{backend}"
    commands = {
        way: command_line(
            name,
            way,
            backend=backend,
            checkpoint=checkpoint,
            output=folder / way / "results.json",
            small=args.vision == "small",
            prompts=args.prompts,
        )
        for way in ways
    }
    environments = {way: {DISABLE: "1"} if way == "in-tree" else {} for way in ways}
    with started(commands, environments, folder) as engines:
        for way, found in measure_in_turn(engines, lambda: args.timeout):
            if isinstance(found, RuntimeError):
                attempts.problems.append(f"{name}, {backend}, {way}: {found}")
                print(attempts.problems[-1], flush=True)
                continue
            keep(
                {
                    "architecture": ARCHITECTURE,
                    "workload": name,
                    "backend": backend,
                    "way": way,
                    **found,
                }
            )
            if way == "ours" and not found["hit_rate_percent"]:
                attempts.problems.append(f"{name}, {backend}: no hits in the log")


if __name__ == "__main__":
    sys.exit(main())
