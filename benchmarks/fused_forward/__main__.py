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
receives fused.json with all of it; a short table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from pathlib import Path
from typing import Any

from benchmarks.fused_forward.tables import overview, print_details, print_kernel_check


def main() -> None:
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
    args = parser.parse_args()
    # Nothing is fetched; a kernel of vLLM's needs the second with Triton 3.6.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    from benchmarks.fused_forward.encoder import run

    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"kernels": [], "encoders": []}
    if not args.no_kernel_check:
        import torch

        from vllm_encoder_cg.kernels import checks

        report["kernels"] = checks.compare_all(torch.device("cuda"))
        print_kernel_check(report["kernels"])
    for encoder in args.encoders:
        architecture, _, backend = encoder.partition(":")
        try:
            found = run(architecture, backend or "FLASH_ATTN", args)
        except Exception as error:
            traceback.print_exc()
            found = {"encoder": encoder, "failed": f"{type(error).__name__}: {error}"}
        report["encoders"].append(found)
        (args.out / "fused.json").write_text(json.dumps(report, indent=1))
        print_details(found)
    print(overview(report["encoders"]), flush=True)
    if any("failed" in found for found in report["encoders"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
