# SPDX-License-Identifier: Apache-2.0
"""Verifies many encoders on a GPU in one process, and prints a line for each.

    python benchmarks/gpu_check.py --out DIR [JOB ...]

A JOB is ``ARCHITECTURE[:BACKEND[:VIDEOS[:DTYPE]]]``: a sample checkpoint with the
released vision configuration, the encoder attention backend (FLASH_ATTN), how many
videos a prompt may have (1; 0 turns videos off), and the dtype (bfloat16).  Without
jobs: every architecture that has an adapter.  DIR receives one JSON file per job,
with every case.

Graphs are forced (no cost model), so that every batch that fits is replayed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One encoder."""

    architecture: str
    backend: str = "FLASH_ATTN"
    videos: int = 1
    dtype: str = "bfloat16"

    @classmethod
    def parse(cls, text: str) -> Job:
        architecture, *rest = text.split(":")
        backend, videos, dtype = (*rest, *("FLASH_ATTN", "1", "bfloat16")[len(rest) :])
        return cls(architecture, backend, int(videos), dtype)

    def __str__(self) -> str:
        return f"{self.architecture}:{self.backend}:{self.videos}:{self.dtype}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", type=Job.parse)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--random-batches", type=int, default=20)
    parser.add_argument("--max-graphs", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="further settings, as JSON"
    )
    args = parser.parse_args()
    # Nothing is fetched; a kernel of vLLM's needs the second with Triton 3.6.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    args.out.mkdir(parents=True, exist_ok=True)

    from vllm_encoder_cg.samples.checkpoints import ARCHITECTURES

    lines = []
    for job in args.jobs or [Job(name) for name in ARCHITECTURES]:
        begin = time.perf_counter()
        try:
            outcome = run(job, args)
        except Exception as error:
            traceback.print_exc()
            outcome = f"FAILED {type(error).__name__}: {error}"
        lines.append(f"{job}: {outcome}, {time.perf_counter() - begin:.0f} s")
        print(lines[-1], flush=True)
        _give_back()
    print("\n".join(["", *lines]), flush=True)


def run(job: Job, args: argparse.Namespace) -> str:
    """Builds, captures and verifies one encoder."""
    import torch
    import vllm

    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )
    from vllm_encoder_cg.samples.checkpoints import ARCHITECTURES
    from vllm_encoder_cg.verification import Verifier, standard_cases

    limits = {"image": 32, "video": job.videos}
    modalities = ARCHITECTURES[job.architecture].modalities
    options = EncoderOptions(
        architecture=job.architecture,
        vision="released",
        backend=job.backend,
        dtype=job.dtype,
        max_tokens=args.max_tokens,
        settings={"cost_model": False, "max_graphs": args.max_graphs} | args.settings,
        engine={"limit_mm_per_prompt": {m: limits[m] for m in modalities}},
    )
    with captured_encoder(options) as manager:
        if not manager.active:
            return f"inactive: {manager.inactive_reason}"
        verifier = Verifier(manager)
        cases = standard_cases(manager, random_batches=args.random_batches)
        results = [verifier.run(case).as_dict() for case in cases]
        stats = manager.get_cumulative_stats()
        backend = manager.adapter.backend_name()
        manager.clear()
    report: dict[str, Any] = {
        "job": str(job),
        "architecture": job.architecture,
        "attention_backend": backend,
        "device": torch.cuda.get_device_name(),
        "dtype": options.dtype,
        "tower": options.vision,
        "vllm": vllm.__version__,
        "date": datetime.date.today().isoformat(),
        "stats": stats,
        "cases": results,
    }
    name = str(job).replace(":", "-")
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1, default=str))
    return _summary(results, stats)


def _summary(results: list[dict[str, Any]], stats: dict[str, Any]) -> str:
    bad = [r["case"] for r in results if not r["ok"]]
    errors = [r["error"] for r in results if not math.isnan(r["error"])]
    return (
        f"{len(results) - len(bad)}/{len(results)} cases ok, "
        f"worst {max(errors):.1e} (rounding explains "
        f"{max(r['allowed_error'] for r in results):.1e}), "
        f"{sum(r['bitwise'] for r in results)} bitwise, "
        f"{sum(r['hits'] for r in results)} hits, "
        f"{sum(r['eager'] for r in results)} eager, "
        f"{stats['num_budgets']} graphs ({len(stats['dropped_graphs'])} dropped), "
        f"{stats['graph_memory_bytes'] / 2**30:.2f} GiB, "
        f"capture {stats['capture_seconds']:.1f} s"
        f"{f'; not ok: {bad}' if bad else ''}"
    )


def _give_back() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
