# SPDX-License-Identifier: Apache-2.0
"""Repeats every check and figure of the docs, on as many GPUs as there are.

    python -m benchmarks.run_all --out DIR [--only NAME ...] [--skip NAME ...]

Runs the jobs of ``jobs.py`` as processes of their own: what is timed has its
GPU alone, checks share one (three at most).  DIR receives a folder per job, with its
results and log.txt as they come, and results.json; a short table comes last.  Exit
code 1: a job failed, took too long, or was not begun before ``--limit-s``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.run_all.jobs import JOBS, chosen_jobs
from benchmarks.run_all.scheduler import Scheduler


def visible_gpus() -> list[str]:
    """As the environment has them, or all."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(i) for i in range(listed.count("GPU "))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("benchmark-results"))
    add("--only", nargs="+", default=[], metavar="NAME", help="mm-* works, too")
    add("--skip", nargs="+", default=[], metavar="NAME")
    add("--gpus", type=int, help="how many to use (default: all)")
    add("--limit-s", type=float, default=float("inf"), help="for all together")
    add("--list", action="store_true", help="print the jobs and end")
    args = parser.parse_args(arguments)
    try:
        jobs = chosen_jobs(JOBS, args.only, args.skip)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        print(
            "| job | GPUs | expected s | most s | python ... |\n|---|---|---:|---:|---|"
        )
        for job in jobs:
            gpus = f"{job.cards}" if job.alone else "shared"
            print(
                f"| {job.name} | {gpus} | {job.expected_s:.0f} | {job.limit_s:.0f} "
                f"| `{job.command}` |"
            )
        return 0
    cards = visible_gpus()
    if not cards or len(cards) < (args.gpus or 0):
        parser.error(f"--gpus: {args.gpus or 'all'} asked for, {len(cards)} found")
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rows = Scheduler(jobs, cards[: args.gpus], args.out.resolve(), args.limit_s).run()
    print(f"\n{table(rows)}", flush=True)
    return int(any(row["failed"] for row in rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per job."""
    lines = ["| job | rc | seconds | found |", "|---|---:|---:|---|"]
    for row in rows:
        name = f"**{row['name']}**" if row["failed"] else row["name"]
        rc = "" if row["rc"] is None else row["rc"]
        lines.append(f"| {name} | {rc} | {row['seconds']:.0f} | {row['found']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
