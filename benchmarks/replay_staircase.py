# SPDX-License-Identifier: Apache-2.0
"""How the time of a replay grows with its budget, on a GPU.

    python benchmarks/replay_staircase.py [--out DIR] [ARCHITECTURE[:BACKEND] ...]

Matrix products round rows up to tiles and choose a kernel by their size, so that
time does not grow evenly: this says where budgets belong.  A graph is captured every
`--step` tokens and replayed with nothing around it.  The table has, per budget, its
time, the time per token more than in the row before, and the least time of any graph
that holds as much.  DIR receives ``summary.json`` with flat records, as ``vllm bench
sweep plot`` reads them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
    write_json,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "encoders", nargs="*", default=["Qwen3VLForConditionalGeneration:FLASH_ATTN"]
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--step", type=int, default=8)
    parser.add_argument("--smallest", type=int, default=48)
    parser.add_argument("--largest", type=int, default=1088)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--vision", default="released", choices=("released", "small"))
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--settings", type=json.loads, default={})
    add_time_limit(parser)
    args = parser.parse_args()
    prepare_environment()
    attempts = Attempts(args.stop_after)
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        if args.out is not None:
            write_json(args.out / "summary.json", records)

    for encoder in args.encoders:
        before = len(records)
        attempts.run(encoder, lambda e=encoder: run(e, args, keep))  # type: ignore[misc]
        of_encoder = records[before:]
        print(f"{encoder}\n\n{markdown_table(of_encoder)}\n", flush=True)
    return attempts.finish(verdict(records))


def run(
    encoder: str, args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:
    """One record per graph, the smallest first."""
    import torch

    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )

    budgets = tuple(range(args.smallest, args.largest + 1, args.step))
    architecture, _, backend = encoder.partition(":")
    backend = backend or "FLASH_ATTN"
    on_gpu = torch.cuda.is_available()
    options = EncoderOptions(
        architecture=architecture,
        vision=args.vision,
        backend=backend if on_gpu else None,
        dtype="bfloat16" if on_gpu else "float32",
        budgets=budgets,
        max_tokens=args.max_tokens,
        settings={"cost_model": False, "self_check": False, **args.settings},
    )
    with captured_encoder(options) as manager:
        for key, graph in sorted(
            manager._graphs.graphs.items(), key=lambda entry: entry[0].token_budget
        ):
            shape = manager._graphs.shapes[key]
            batch = manager.adapter.parse(manager.adapter.cost_sample(shape))
            items = range(len(batch.specs))
            with torch.inference_mode():
                manager.adapter.fill(batch, items, graph.input_buffers, shape)
            keep(
                {
                    "architecture": architecture,
                    "backend": backend,
                    "device": torch.cuda.get_device_name(),
                    "token_budget": key.token_budget,
                    "median_replay_ms": median_ms(graph.graph.replay, args.rounds),
                }
            )
        manager.clear()


def median_ms(replay: Callable[[], None], rounds: int) -> float:
    """Of a replay on an idle device, by its events."""
    import torch

    times = []
    for round_ in range(rounds + 3):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        if round_ >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def markdown_table(records: list[dict[str, Any]]) -> str:
    """One row per budget."""
    lines = [
        "| budget | replay (ms) | us per token more | least of any larger (ms) |",
        "|---|---|---|---|",
    ]
    before: tuple[int, float] | None = None
    for i, record in enumerate(records):
        budget, ms = record["token_budget"], record["median_replay_ms"]
        slope = ""
        if before is not None:
            slope = f"{(ms - before[1]) / (budget - before[0]) * 1e3:.1f}"
        least = min(other["median_replay_ms"] for other in records[i:])
        lines.append(
            f"| {budget} | {ms:.3f} | {slope} "
            f"| {f'**{least:.3f}**' if least < 0.98 * ms else f'{least:.3f}'} |"
        )
        before = budget, ms
    return "\n".join(lines)


def verdict(records: list[dict[str, Any]]) -> str:
    """How many budgets a larger graph undercuts."""
    times = [record["median_replay_ms"] for record in records]
    slower = sum(min(times[i:]) < 0.98 * ms for i, ms in enumerate(times))
    return f"{len(times)} budgets, a larger one is 2 % faster than {slower} of them"


if __name__ == "__main__":
    sys.exit(main())
