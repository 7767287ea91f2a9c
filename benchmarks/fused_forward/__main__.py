# SPDX-License-Identifier: Apache-2.0
"""Times fused forwards against vLLM's on a GPU, and checks them.

    python -m benchmarks.fused_forward --out DIR [ARCHITECTURE[:BACKEND] ...]

Per encoder (released configuration, random weights of a real scale, BF16):

- every case through a manager that captured vLLM's forward ("plain") and one that
  captured the fused forward ("fused"), next to the floor (a graph of vLLM's forward
  for exactly the batch) and a graph of the fused forward for exactly the batch;
- the error of eager and of the fused graph against the same tower in float64;
- the kernels of the floor and of the fused graph, by name and by kind;
- with ``--steps``, the fused graph without each of its steps.

Before that, every kernel against its plain reference over shapes and dtypes.  DIR
receives fused.json with all of it, written anew after every case; a short table
comes last.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.fused_forward.tables import (
    overview,
    print_details,
    print_kernel_check,
    verdict,
)
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
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--vision", default="released", choices=("released", "small"))
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--no-kernel-check", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={})
    add_time_limit(parser)
    args = parser.parse_args()
    prepare_environment()
    from benchmarks.fused_forward.encoder import run

    attempts = Attempts(args.stop_after)
    report: dict[str, Any] = {"kernels": [], "encoders": []}

    def save() -> None:
        write_json(args.out / "fused.json", report)

    if not args.no_kernel_check:
        report["kernels"] = attempts.run("kernels", check_kernels) or []
        save()
        wrong = {row["kernel"] for row in report["kernels"] if not row["ok"]}
        attempts.problems += [f"kernel {name} is WRONG" for name in sorted(wrong)]
    for encoder in args.encoders:
        found: dict[str, Any] = {"encoder": encoder, "cases": []}
        report["encoders"].append(found)
        before = len(attempts.problems)
        attempts.run(encoder, lambda f=found: run(f, args, attempts, save))  # type: ignore[misc]
        found["problems"] = attempts.problems[before:]
        save()
        print_details(found)
    print(overview(report["encoders"]), flush=True)
    return attempts.finish(verdict(report))


def check_kernels() -> list[dict[str, Any]]:
    """Every kernel against its plain reference, over shapes and dtypes."""
    import torch

    from vllm_encoder_cg.kernels import checks

    rows = [dict(row) for row in checks.compare_all(torch.device("cuda"))]
    print_kernel_check(rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
