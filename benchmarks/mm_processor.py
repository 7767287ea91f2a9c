# SPDX-License-Identifier: Apache-2.0
"""Runs ``vllm bench mm-processor`` on one GPU: eager, in-tree and ours.

    python benchmarks/mm_processor.py --out DIR [--workloads NAME ...]

A Qwen3-VL with the released vision configuration, random weights and a small text
model; images are random.  Workloads:

- ``mixed``: one image per prompt, half 480x640 and half 336x336;
- ``wide``: one to four images per prompt, from 224x224 to 1920x1080;
- ``twenty``: 20 images of 336x336 per prompt, with the budgets of vLLM's published
  figures for several GPUs, here on one.

Each way is an engine of its own, which takes a minute or two to start.  DIR receives
``summary.json`` with flat records, as ``vllm bench sweep plot`` reads them, and a
table (README.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
WAYS = ("eager", "in-tree", "ours")
_ACTIVE = re.compile(r"vllm-encoder-cg \S+ active for")


@dataclass(frozen=True)
class Workload:
    """What is encoded, and how graphs are captured for it."""

    prompts: int
    items: int
    """Images per prompt."""
    spread: float
    """The number of images is ``items * (1 +- spread)``."""
    buckets: dict[tuple[int, int], float]
    """(height, width) -> share."""
    compilation_config: dict[str, Any] = field(default_factory=dict)


WORKLOADS = {
    "mixed": Workload(200, 1, 0.0, {(480, 640): 0.5, (336, 336): 0.5}),
    "wide": Workload(
        200,
        2,
        0.5,
        {(224, 224): 0.25, (480, 640): 0.25, (768, 1024): 0.25, (1080, 1920): 0.25},
    ),
    "twenty": Workload(
        100,
        20,
        0.0,
        {(336, 336): 1.0},
        {
            "encoder_cudagraph_token_budgets": [
                *(512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864)
            ],
            "encoder_cudagraph_max_vision_items_per_batch": 8,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS
    )
    parser.add_argument("--backends", nargs="+", default=["FLASH_ATTN"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--vision", default="released", choices=("released", "small"))
    parser.add_argument("--prompts", type=int, help="instead of the workload's number")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per run")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    args.out.mkdir(parents=True, exist_ok=True)

    from vllm_encoder_cg.samples.checkpoints import write_checkpoint

    records: list[dict[str, Any]] = []
    failed = []
    with tempfile.TemporaryDirectory(prefix="mm-processor-") as folder:
        checkpoint = write_checkpoint(ARCHITECTURE, Path(folder), vision=args.vision)
        for name in args.workloads:
            for backend in args.backends:
                for way in args.ways:
                    try:
                        record = run(name, backend, way, checkpoint, args)
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        failed.append(f"{name}, {backend}, {way}: {error}")
                        print(failed[-1], flush=True)
                        continue
                    records.append(record)
                    print(describe(record), flush=True)
                    (args.out / "summary.json").write_text(
                        json.dumps(records, indent=1) + "\n"
                    )
    table = markdown(records)
    command = shlex.join(["python", *sys.argv])
    (args.out / "README.md").write_text(f"```\n{command}\n```\n\n{table}\n")
    print(table, *failed, sep="\n")
    if failed:
        raise SystemExit(1)


def run(
    name: str, backend: str, way: str, checkpoint: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """One engine.

    Raises:
        RuntimeError: it failed; with the end of its output.
        subprocess.TimeoutExpired: it took too long.
    """
    from vllm_encoder_cg.integration.environment import DISABLE
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs

    workload = WORKLOADS[name]
    most = round(workload.items * (1 + workload.spread))
    output = args.out / f"{name}-{backend}-{way}.json"
    config: dict[str, Any] = {}
    if way != "eager":
        config = {"cudagraph_mm_encoder": True} | workload.compilation_config
    small = args.vision == "small"
    buckets = {(h, w, 1): share for (h, w), share in workload.buckets.items()}
    options = engine_kwargs(ARCHITECTURE) | {
        "model": checkpoint,
        "max_model_len": 2048 if small else 16384,
        "max_num_batched_tokens": 2048 if small else 16384,
        "limit_mm_per_prompt": {"image": most, "video": 0},
        "mm_encoder_attn_backend": backend,
        "compilation_config": config,
        "dataset_name": "random-mm",
        "num_prompts": args.prompts or workload.prompts,
        "num_warmups": max(2, (args.prompts or workload.prompts) // 10),
        "random_input_len": 8,
        "output_len": 2,
        "random_mm_base_items_per_request": workload.items,
        "random_mm_num_mm_items_range_ratio": workload.spread,
        "random_mm_limit_mm_per_prompt": {"image": most, "video": 0},
        "random_mm_bucket_config": str(buckets),
        "output_json": output,
        "seed": 42,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench"]
    done = subprocess.run(
        [*command, "mm-processor", "--disable-tqdm", *as_options(options)],
        env=os.environ | ({DISABLE: "1"} if way == "in-tree" else {}),
        capture_output=True,
        text=True,
        timeout=args.timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    active = bool(_ACTIVE.search(done.stdout + done.stderr))
    if active != (way == "ours"):
        raise RuntimeError(
            f"this package's graphs are {'' if active else 'not '}active"
        )
    measured = json.loads(output.read_text())
    forward = measured["mm_processor_stats"]["encoder_forward_ms"]
    return {
        "architecture": ARCHITECTURE,
        "workload": name,
        "backend": backend,
        "way": way,
        "prompts": measured["completed"],
        "mean_encoder_forward_ms": forward["mean"],
        "median_encoder_forward_ms": forward["median"],
        "p99_encoder_forward_ms": forward.get("p99") or forward["p99.0"],
    }


def as_options(options: dict[str, Any]) -> list[str]:
    """Arguments as vLLM's command line takes them."""
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        elif value not in ({}, None):
            words += [
                option,
                json.dumps(value) if isinstance(value, dict) else str(value),
            ]
    return words


def describe(record: dict[str, Any]) -> str:
    return (
        f"{record['workload']}, {record['backend']}, {record['way']}: encoder_forward "
        f"mean {record['mean_encoder_forward_ms']:.2f} ms, "
        f"P99 {record['p99_encoder_forward_ms']:.2f} ms"
    )


def markdown(records: list[dict[str, Any]]) -> str:
    """A table: mean and P99 by way, and what ours saves."""
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        of_run = runs.setdefault((record["workload"], record["backend"]), {})
        of_run[record["way"]] = record
    lines = [
        "| workload | backend | | "
        + " | ".join(f"{way} (ms)" for way in WAYS)
        + " | ours / eager | ours / in-tree |",
        "|---|---|---|" + "---:|" * (len(WAYS) + 2),
    ]
    for (workload, backend), by_way in runs.items():
        for label in ("mean", "p99"):
            values = {
                way: record[f"{label}_encoder_forward_ms"]
                for way, record in by_way.items()
            }
            cells = [f"{values[way]:.2f}" if way in values else "" for way in WAYS]
            cells += [
                f"{values['ours'] / values[way]:.3f}"
                if {"ours", way} <= set(values)
                else ""
                for way in ("eager", "in-tree")
            ]
            lines.append(f"| {workload} | {backend} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
