# SPDX-License-Identifier: Apache-2.0
"""Verifies many encoders on a GPU in one process, and prints a line for each.

    python benchmarks/gpu_check.py --out DIR [JOB ...]

A JOB is ``ARCHITECTURE[:BACKEND[:VIDEOS[:DTYPE]]]``: a sample checkpoint with the
released vision configuration, the encoder attention backend (FLASH_ATTN), how many
videos a prompt may have (1; 0 turns videos off), and the dtype (bfloat16).  Without
jobs: every architecture that has an adapter.  DIR receives one JSON file per job,
written anew after every case.

Graphs are forced (no cost model), so that every batch that fits is replayed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
    write_json,
)


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


def main() -> int:
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
    parser.add_argument("--vision", default="released", choices=("released", "small"))
    add_time_limit(parser)
    args = parser.parse_args()
    prepare_environment()

    from vllm_encoder_cg.samples.checkpoints import ARCHITECTURES

    attempts = Attempts(args.stop_after)
    reports = []
    jobs = args.jobs or [Job(name) for name in ARCHITECTURES]
    for job in jobs:
        report = attempts.run(str(job), lambda j=job: run(j, args, attempts))  # type: ignore[misc]
        if report is not None:
            reports.append(report)
            attempts.problems += [f"{job}: {each}" for each in problems(report)]
    print("\n".join(f"{r['job']}: {describe(r)}" for r in reports), flush=True)
    errors = [error for report in reports for error in _errors(report)]
    worst = f", worst {max(errors):.1e}" if errors else ""
    right = sum(not problems(report) for report in reports)
    return attempts.finish(f"{right} of {len(jobs)} encoders right{worst}")


def run(job: Job, args: argparse.Namespace, attempts: Attempts) -> dict[str, Any]:
    """Builds, captures and verifies one encoder; the report, as it is written."""
    import torch
    import vllm

    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )
    from vllm_encoder_cg.samples.checkpoints import ARCHITECTURES
    from vllm_encoder_cg.verification import Verifier, standard_cases

    on_gpu = torch.cuda.is_available()
    limits = {"image": 32, "video": job.videos}
    modalities = ARCHITECTURES[job.architecture].modalities
    options = EncoderOptions(
        architecture=job.architecture,
        vision=args.vision,
        backend=job.backend if on_gpu else None,
        dtype=job.dtype if on_gpu else "float32",
        max_tokens=args.max_tokens,
        settings={"cost_model": False, "max_graphs": args.max_graphs} | args.settings,
        engine={"limit_mm_per_prompt": {m: limits[m] for m in modalities}},
    )
    report: dict[str, Any] = {
        "job": str(job),
        "architecture": job.architecture,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "dtype": options.dtype,
        "tower": options.vision,
        "vllm": vllm.__version__,
        "date": datetime.date.today().isoformat(),
        "complete": False,
        "inactive": None,
        "cases": [],
    }
    path = args.out / f"{str(job).replace(':', '-')}.json"
    with captured_encoder(options) as manager:
        report["inactive"] = manager.inactive_reason
        report["stats"] = manager.get_cumulative_stats()
        report["memory_limit_gib"] = manager.settings.memory_limit_gib
        if manager.active:
            report["attention_backend"] = manager.adapter.backend_name()
            verifier = Verifier(manager)
            for case in standard_cases(
                manager,
                largest_side=2048 if args.vision == "released" else 256,
                random_batches=args.random_batches,
            ):
                if not attempts.in_time():
                    break
                report["cases"].append(verifier.run(case).as_dict())
                report["stats"] = manager.get_cumulative_stats()
                write_json(path, report)
            else:
                report["complete"] = True
        manager.clear()
    write_json(path, report)
    return report


def problems(report: dict[str, Any]) -> list[str]:
    """Why an encoder is not right."""
    if report["inactive"]:
        return [f"inactive: {report['inactive']}"]
    found = [
        f"{case['case']}: {problem}"
        for case in report["cases"]
        for problem in case["problems"]
    ]
    found += [f"dropped: {graph}" for graph in report["stats"]["dropped_graphs"]]
    if not report["complete"]:
        found.append("no time left for all cases")
    elif not any(case["hits"] for case in report["cases"]):
        found.append("nothing was replayed")
    return found


def describe(report: dict[str, Any]) -> str:
    """One line.  Memory means something only where nothing else used the GPU."""
    if report["inactive"]:
        return f"inactive: {report['inactive']}"
    cases, stats = report["cases"], report["stats"]
    limit = report["memory_limit_gib"]
    phases = stats["capture_phases"].items()
    return (
        f"{sum(case['ok'] for case in cases)}/{len(cases)} cases ok, "
        f"worst {max(_errors(report), default=0.0):.1e} (rounding explains "
        f"{max((c['allowed_error'] for c in cases), default=0.0):.1e}), "
        f"{sum(case['bitwise'] for case in cases)} bitwise, "
        f"{sum(case['hits'] for case in cases)} hits, "
        f"{sum(case['eager'] for case in cases)} eager, "
        f"{stats['num_budgets']} graphs ({len(stats['dropped_graphs'])} dropped), "
        f"{stats['graph_memory_bytes'] / 2**30:.2f} GiB"
        f"{f' (limit {limit:.2f})' if limit else ''}, "
        f"start-up {stats['capture_seconds']:.1f} s "
        f"({' + '.join(f'{name} {s:.1f}' for name, s in phases)})"
    )


def _errors(report: dict[str, Any]) -> list[float]:
    return [c["error"] for c in report["cases"] if not math.isnan(c["error"])]


if __name__ == "__main__":
    sys.exit(main())
