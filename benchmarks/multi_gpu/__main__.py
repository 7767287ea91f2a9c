# SPDX-License-Identifier: Apache-2.0
"""Runs the parts and prints one short table last.

::

    python -m benchmarks.multi_gpu --ranks 4 --output results

Without GPUs, ``--vision small`` runs the same on the CPU over gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.multi_gpu.setup import ARCHITECTURES, QWEN3, Encoder

PARTS = ("correctness", "timing", "tokens", "mm-processor")
MODES = ("data", "weights")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multi_gpu")
    add = parser.add_argument
    add("--ranks", type=int, default=0, help="GPUs to use (default: all)")
    add("--output", type=Path, default=Path("multi-gpu"), help="folder of the JSON")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--vision", choices=("released", "small"), default="released")
    add("--architectures", nargs="+", default=list(ARCHITECTURES))
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--backends", nargs="+", default=["FLASH_ATTN", "FLASHINFER"])
    add("--batches", type=int, default=50, help="random batches per encoder")
    add("--rounds", type=int, default=200, help="timed requests per way")
    options = parser.parse_args(arguments)
    if options.ranks < 0:
        parser.error(f"--ranks: got {options.ranks}; use a positive number")
    return options


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count() or 2


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    ranks = options.ranks or count_gpus()
    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for part in options.parts:
        try:
            found = run_part(part, ranks, options)
        except Exception as error:
            # The other parts may still show something.
            found = [{"part": part, "problems": [f"{type(error).__name__}: {error}"]}]
        (options.output / f"{part}-{ranks}.json").write_text(
            json.dumps(found, indent=2) + "\n"
        )
        print(f"{part}: {time.monotonic() - begin:.0f} s since start", flush=True)
        rows += found
    print("\n".join(map(describe, rows)))
    return int(any(is_wrong(row) for row in rows))


def run_part(
    part: str, ranks: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of one part."""
    if part == "correctness":
        from benchmarks.multi_gpu.correctness import check

        return [
            vars(result)
            for name in options.architectures
            for result in check(
                [Encoder(name, mode, options.vision) for mode in options.modes],
                ranks,
                options.batches,
            )
        ]
    if part == "timing":
        from benchmarks.multi_gpu.timing import time_encoders

        encoders = [
            Encoder(QWEN3, mode, options.vision, backend)
            for backend in options.backends
            for mode in options.modes
        ]
        return time_encoders(encoders, ranks, options.rounds)
    from benchmarks.multi_gpu.engines import bench_mm_processor, compare_tokens

    with tempfile.TemporaryDirectory(prefix="multi-gpu-") as folder:
        if part == "tokens":
            return compare_tokens(ranks, options.vision, Path(folder))
        return bench_mm_processor(
            ranks, options.vision, options.backends, Path(folder), options.batches
        )


def is_wrong(row: dict[str, Any]) -> bool:
    return bool(row.get("problems")) or row.get("equal_tokens") is False


def describe(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "exchange" in row:
        chosen = " (chosen)" if row.get("chosen") else ""
        return f"{row['exchange']:<44} {row['us']:9.0f} us{chosen}"
    if "mean_ms" in row:
        name = f"{row.get('encoder') or row['bench']}, {row['way']}"
        return f"{name:<72} mean {row['mean_ms']:8.2f}  P99 {row['p99_ms']:8.2f} ms"
    if "equal_tokens" in row:
        tokens = "equal tokens" if row["equal_tokens"] else "OTHER TOKENS"
        return (
            f"{row['engine']:<44} {tokens}; graphs by rank {row['graphs_by_rank']}, "
            f"hits {row['hits_by_rank']}{': ' if row['problems'] else ''}"
            f"{'; '.join(row['problems'])}"
        )
    if "replayed" in row:
        verdict = "; ".join(row["problems"][:3]) or "right"
        return (
            f"{row['encoder']:<56} as {row['mode']:<8} {row['batches']} batches, "
            f"error {row['error']:.1e}, {row['replayed']} items by graph, "
            f"{row['eager']} eagerly: {verdict}"
        )
    return f"{row['part']}: {'; '.join(row['problems'])}"


if __name__ == "__main__":
    sys.exit(main())
