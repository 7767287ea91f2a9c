# SPDX-License-Identifier: Apache-2.0
"""What ``execute`` takes of the host per batch, step by step, in microseconds.

    python benchmarks/host_work.py [--out DIR] [ARCHITECTURE[:BACKEND] ...]

Of 1 and of 20 images: the whole call; the same with replays left out; then each of its
steps alone, and what remains.  On a GPU the device is idle at the start of each call
and is not waited for at its end, and ``replay`` is the launch of the graph; towers have
their released configuration, images 336x336 pixels.  While a GPU encodes many images,
others take the host's caches; with replays left out they do not.  On a CPU the encoder
itself is replaced by nothing, so only the host's work is left; towers are small, and
images 64x64, as the host copies pixels there.  DIR receives ``summary.json`` with flat
records, as ``vllm bench sweep plot`` reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
    write_json,
)

ARCHITECTURES = [
    "Qwen3VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "InternVLChatModel",
    "DeepseekOCRForCausalLM",
    "MiniCPMV4_5",
    "Gemma4ForConditionalGeneration",
]
ITEMS = (1, 20)
SIZE = {"cuda": (336, 336), "cpu": (64, 64)}
LIMIT_S = 1.5
"""Of all calls of one step: what the GPU computes takes its time, too."""
STEPS = ("parse", "plan", "fill", "replay", "copy out", "assemble", "statistics")


class NoReplay:
    """Stands for a graph whose replay takes no time."""

    def replay(self) -> None:
        pass


@contextlib.contextmanager
def without_encoder() -> Iterator[None]:
    """Managers that capture inside of this encode nothing."""
    import torch

    from vllm_encoder_cg.manager import EncoderCudaGraphManager

    capture = EncoderCudaGraphManager.capture

    def capture_nothing(manager: Any, graph_pool: Any = None) -> None:
        adapter, width = manager.adapter, manager.config.out_hidden_size
        adapter.forward = lambda buffers, shape: torch.zeros(
            (shape.capacity.tokens, width), dtype=manager.dtype
        )
        capture(manager, graph_pool)
        for graph in manager._graphs.graphs.values():
            graph.graph = NoReplay()

    with patch.object(EncoderCudaGraphManager, "capture", capture_nothing):
        yield


@contextlib.contextmanager
def without_replays(manager: Any) -> Iterator[None]:
    """Nothing is encoded inside of this."""
    graphs = manager._graphs.graphs.values()
    replayed = [graph.graph for graph in graphs]
    for graph in graphs:
        graph.graph = NoReplay()
    try:
        yield
    finally:
        for graph, real in zip(graphs, replayed, strict=True):
            graph.graph = real


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("encoders", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, help="of the largest graph")
    add_time_limit(parser)
    args = parser.parse_args()
    prepare_environment()
    attempts = Attempts(args.stop_after)
    records: list[dict[str, Any]] = []
    for encoder in args.encoders:
        records += attempts.run(encoder, lambda e=encoder: run(e, args)) or []  # type: ignore[misc]
        if args.out is not None:
            write_json(args.out / "summary.json", records)
    print(markdown_table(records))
    return attempts.finish(verdict(records))


def run(encoder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of one encoder."""
    import torch

    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )
    from vllm_encoder_cg.samples.encoder_inputs import image_batch

    architecture, _, backend = encoder.partition(":")
    on_gpu = torch.cuda.is_available()
    options = EncoderOptions(
        architecture=architecture,
        vision="released" if on_gpu else "small",
        backend=backend or ("FLASH_ATTN" if on_gpu else None),
        dtype="bfloat16" if on_gpu else None,
        max_tokens=args.max_tokens or (16384 if on_gpu else 1024),
        # As if all of a batch is always replayed.
        settings={"cost_model": False, "self_check": False}
        | ({} if on_gpu else {"max_graphs": 8}),
        engine={"limit_mm_per_prompt": {"image": 32}},
    )
    records = []
    with contextlib.ExitStack() as stack:
        if not on_gpu:
            stack.enter_context(without_encoder())
        manager = stack.enter_context(captured_encoder(options))
        for items in ITEMS:
            size = SIZE[manager.device.type]
            mm_kwargs = image_batch(manager.adapter, [size] * items, seed=1)
            record = {
                "architecture": architecture,
                "backend": backend or "default",
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "items": items,
            }
            with torch.inference_mode():
                record |= measure(manager, mm_kwargs, args.rounds)
            records.append(record)
        manager.clear()
    return records


def measure(manager: Any, mm_kwargs: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Tokens, sub-batches, and microseconds: in all, per step, and the rest."""
    adapter, graphs = manager.adapter, manager._graphs
    planner, log = manager._executor.planner, manager._executor.log
    batch = adapter.parse(mm_kwargs)
    plan = planner.plan(batch.specs)
    steps = dict.fromkeys(STEPS, 0.0)
    total = time_us(lambda: manager.execute(mm_kwargs), rounds)
    with without_replays(manager):
        around = time_us(lambda: manager.execute(mm_kwargs), rounds)
    steps["parse"] = time_us(lambda: adapter.parse(mm_kwargs), rounds)
    steps["plan"] = time_us(lambda: planner.plan(batch.specs), rounds)
    steps["statistics"] = time_us(lambda: log.finished(batch, plan, None), rounds)
    for sub_batch in plan.sub_batches:
        indices = sub_batch.indices
        rows = {}
        for path, step in sub_batch.steps.items():
            if step.key is None:
                continue
            graph, shape = graphs.graphs[step.key], graphs.shapes[step.key]
            steps["fill"] += time_us(
                lambda g=graph, s=shape, i=indices: adapter.fill(  # type: ignore[misc]
                    batch, i, g.input_buffers, s
                ),
                rounds,
            )
            steps["replay"] += time_us(graph.graph.replay, rounds)
            count = adapter.output_rows(batch, indices, path)
            rows[path] = graph.output_buffer[:count].clone()
            steps["copy out"] += time_us(
                lambda g=graph, n=count: g.output_buffer[:n].clone(),  # type: ignore[misc]
                rounds,
            )
        steps["assemble"] += time_us(
            lambda i=indices, r=rows: adapter.assemble(batch, i, r),  # type: ignore[misc]
            rounds,
        )
    return {
        "tokens": sum(spec.output_tokens for spec in batch.specs),
        "sub_batches": len(plan.sub_batches),
        "execute_us": total,
        "without_replay_us": around,
        **{f"{name.replace(' ', '_')}_us": us for name, us in steps.items()},
        "rest_us": around - sum(steps.values()) + steps["replay"],
    }


def time_us(call: Callable[[], Any], rounds: int) -> float:
    """Median microseconds on the host."""
    import torch

    settle = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(10):
        call()
    gc.collect()
    gc.disable()
    deadline = time.perf_counter() + LIMIT_S
    try:
        for _ in range(rounds):
            settle()
            if times and time.perf_counter() > deadline:
                break
            begin = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begin) / 1e3)
    finally:
        gc.enable()
    settle()
    return statistics.median(times)


def markdown_table(records: list[dict[str, Any]]) -> str:
    """One row per architecture and number of images."""
    names = ["execute", "without replay", *STEPS, "rest"]
    lines = [
        f"| encoder | images | tokens | sub-batches | {' | '.join(names)} |",
        "|---" * (4 + len(names)) + "|",
    ]
    for record in records:
        values = (record[f"{name.replace(' ', '_')}_us"] for name in names)
        lines.append(
            f"| {record['architecture']} | {record['items']} | {record['tokens']} "
            f"| {record['sub_batches']} "
            f"| {' | '.join(f'{us:.0f}' for us in values)} |"
        )
    return "\n".join(lines)


def verdict(records: list[dict[str, Any]]) -> str:
    """The host's work around the replay, at most, by number of images."""
    parts = []
    for items in ITEMS:
        around = [r["without_replay_us"] for r in records if r["items"] == items]
        if around:
            parts.append(f"{items} images {max(around):.0f} us")
    return f"around the replay at most: {', '.join(parts) or 'nothing measured'}"


if __name__ == "__main__":
    sys.exit(main())
