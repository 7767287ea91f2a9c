# SPDX-License-Identifier: Apache-2.0
"""What a replay takes beyond a graph of exactly its batch, and why, on a GPU.

    python benchmarks/padding_gap.py [--out DIR] [ARCHITECTURE[:BACKEND] ...]

The same batches by graphs of the captured forward whose rows, room for sequences and
bound of the longest sequence are those of the batch or those of the graph that the
planner takes; nothing but the replay is timed.  For packed towers.  DIR receives
``summary.json`` with flat records.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
    write_json,
)

CASES = (
    "1 x 1920x1080",
    "4 x 336x336",
    "20 x 336x336",
    "8 mixed sizes",
    "5 x 640x480",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "encoders", nargs="*", default=["Qwen3VLForConditionalGeneration:FLASH_ATTN"]
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
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
    """One record per case and graph."""
    import torch

    from vllm_encoder_cg.benchmarking.cases import STANDARD_CASES
    from vllm_encoder_cg.benchmarking.timing import time_in_turn
    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )
    from vllm_encoder_cg.samples.encoder_inputs import media_batch

    architecture, _, backend = encoder.partition(":")
    backend = backend or "FLASH_ATTN"
    on_gpu = torch.cuda.is_available()
    options = EncoderOptions(
        architecture=architecture,
        vision=args.vision,
        backend=backend if on_gpu else None,
        dtype="bfloat16" if on_gpu else "float32",
        max_tokens=args.max_tokens,
        settings={"cost_model": False, "self_check": False, **args.settings},
        engine={"limit_mm_per_prompt": {"image": 32, "video": 1}},
    )
    with captured_encoder(options) as manager:
        for case in STANDARD_CASES:
            if case.name not in CASES:
                continue
            mm_kwargs = media_batch(manager.adapter, case.batch, seed=1)
            graphs = make_graphs(manager, mm_kwargs)
            times = time_in_turn(graphs, torch.device("cuda"), args.rounds)
            for name, of_graph in times.items():
                keep(
                    {
                        "architecture": architecture,
                        "backend": backend,
                        "device": torch.cuda.get_device_name(),
                        "case": case.name,
                        "graph": name,
                        "median_replay_ms": statistics.median(of_graph),
                    }
                )
            del graphs
        manager.clear()


def make_graphs(manager: Any, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replays by name."""
    adapter = manager.adapter
    batch = adapter.parse(mm_kwargs)
    tokens = sum(spec.output_tokens for spec in batch.specs)
    items = len(batch.specs)
    budget = min(
        key.token_budget for key in manager._graphs.graphs if key.token_budget >= tokens
    )
    room = adapter.capacity(
        next(k for k in manager._graphs.graphs if k.token_budget == budget),
        manager.budgets.limits,
    ).extra["sequences"]
    return {
        "exact": make_graph(manager, batch, tokens, items),
        "exact rows, room for 64": make_graph(manager, batch, tokens, 64),
        f"exact rows, room for {room}": make_graph(manager, batch, tokens, room),
        f"{budget} tokens, exact room": make_graph(manager, batch, budget, items),
        f"{budget} tokens, room for 64": make_graph(manager, batch, budget, 64),
        f"{budget} tokens, room for {room}": make_graph(manager, batch, budget, room),
        f"{budget} tokens, 64 tokens more": make_graph(
            manager, batch, budget + 64, room
        ),
    }


def make_graph(manager: Any, batch: Any, tokens: int, sequences: int) -> Any:
    """The replay of a graph of so many tokens with room for so many sequences, filled
    with a batch."""
    import torch

    from vllm_encoder_cg.adapter import GraphShape
    from vllm_encoder_cg.definitions import BatchLimits, GraphKey

    adapter = manager.adapter
    # Adapters keep layouts by key; a packed one takes no axis keys.
    key = GraphKey("default", tokens, ("gap", sequences))
    capacity = adapter.capacity(key, BatchLimits(sequences, sequences))
    capacity = replace(capacity, extra={**capacity.extra, "sequences": sequences})
    shape = GraphShape(key, capacity)
    buffers = {
        name: torch.zeros(spec.shape, dtype=spec.dtype, device=manager.device)
        for name, spec in adapter.buffer_specs(shape).items()
    }
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream):
        adapter.fill(batch, range(len(batch.specs)), buffers, shape)
        for _ in range(2):
            adapter.forward(buffers, shape)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            output = adapter.forward(buffers, shape)
    torch.cuda.synchronize()

    def replay(keep: Any = (buffers, output)) -> None:
        graph.replay()

    return replay


def markdown_table(records: list[dict[str, Any]]) -> str:
    """One row per case and graph, against the exact one."""
    lines = ["| case | graph | replay (ms) | / exact |", "|---|---|---:|---:|"]
    exact = 0.0
    for record in records:
        ms = record["median_replay_ms"]
        if record["graph"] == "exact":
            exact = ms
        lines.append(
            f"| {record['case']} | {record['graph']} | {ms:.2f} | {ms / exact:.3f} |"
        )
    return "\n".join(lines)


def verdict(records: list[dict[str, Any]]) -> str:
    """The slowest graph beside its exact one."""
    worst, exact = "nothing measured", 0.0
    ratio = 0.0
    for record in records:
        if record["graph"] == "exact":
            exact = record["median_replay_ms"]
        elif record["median_replay_ms"] / exact > ratio:
            ratio = record["median_replay_ms"] / exact
            worst = f"{ratio:.3f} of exact at most: {record['case']}, {record['graph']}"
    return worst


if __name__ == "__main__":
    sys.exit(main())
