# SPDX-License-Identifier: Apache-2.0
"""Are the times while serving right, and what do they cost the host?

Replays a CUDA graph of matrix products many times, as a server would, and compares
what ``StepTimer`` adds up with the time between two events around everything:

    python benchmarks/step_times.py [--out DIR]

DIR receives ``summary.json``.  Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_encoder_cg.benchmarking.scripts import verdict_line, write_json
from vllm_encoder_cg.observability.metrics import EncoderStats
from vllm_encoder_cg.observability.step_timer import EVERY_BATCHES, StepTimer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--size", type=int, default=2048, help="of the matrices")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    graph = _record(arguments.size)
    rows = []
    for every in (None, 1, EVERY_BATCHES):
        rows.append(_run(graph, arguments.batches, every))
        if arguments.out:
            write_json(arguments.out / "summary.json", rows)
    print(table(rows))
    print(verdict(rows))
    return 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per way of timing."""
    lines = [f"{'timed':<14}{'GPU (s)':>10}{'added up (s)':>14}{'host (us/batch)':>17}"]
    for row in rows:
        name = f"1 in {row['every']}" if row["every"] else "none"
        lines.append(
            f"{name:<14}{row['seconds']:>10.4f}{row['estimate']:>14.4f}"
            f"{row['host_us']:>17.2f}"
        )
    return "\n".join(lines)


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """How far the estimates are off, and what they cost."""
    untimed, *timed = rows
    off = max(abs(row["estimate"] / row["seconds"] - 1) for row in timed)
    cost = timed[-1]["host_us"] - untimed["host_us"]
    return verdict_line(f"times {off:.1%} off at most, {cost:.1f} us per batch")


def _record(size: int) -> torch.cuda.CUDAGraph:
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16) / size**0.5
    a @ a
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b = a
        for _ in range(20):
            b = b @ a
    return graph


def _run(
    graph: torch.cuda.CUDAGraph, batches: int, every: int | None
) -> dict[str, float | int | None]:
    stats = EncoderStats()
    timer = StepTimer(torch.device("cuda"), stats, every or 1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    host = 0.0
    begin.record()
    for i in range(batches):
        started = time.perf_counter()
        if every:
            timer.begin_batch()
            with timer.step(by_graph=True):
                graph.replay()
        else:
            graph.replay()
        host += time.perf_counter() - started
        if i % 50 == 49:  # a full queue would be counted as host time
            torch.cuda.synchronize()
    end.record()
    end.synchronize()
    timer.collect()
    return {
        "every": every,
        "seconds": begin.elapsed_time(end) / 1e3,
        "estimate": stats.replay_seconds,
        "timed_batches": stats.timed_batches,
        "host_us": 1e6 * host / batches,
    }


if __name__ == "__main__":
    sys.exit(main())
