# SPDX-License-Identifier: Apache-2.0
"""Times encoders on a GPU four ways: eager, vLLM's in-tree manager, this project's,
and the floor (a graph of vLLM's own forward for exactly the batch).

    python benchmarks/encoder_latency.py --out DIR [ARCHITECTURE[:BACKEND] ...]

The tower has the released configuration and random weights of a real scale; inputs
are random patches on grids of ``floor(side / 32) x 2`` patches a side (for
Qwen3-VL), made without an image processor.  DIR receives, per encoder, a table
(Markdown) and ``summary.json`` with flat records, as ``vllm bench sweep plot``
reads them.  Only ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

CASES: dict[str, list[tuple[int, int]]] = {
    "1 x 224x224": [(224, 224)],
    "1 x 336x336": [(336, 336)],
    "1 x 512x512": [(512, 512)],
    "1 x 640x480": [(640, 480)],
    "1 x 1024x1024": [(1024, 1024)],
    "1 x 1920x1080": [(1920, 1080)],
    "1 x 2048x2048": [(2048, 2048)],
    "4 x 336x336": [(336, 336)] * 4,
    "20 x 336x336": [(336, 336)] * 20,
    "8 mixed sizes": [
        (224, 224),
        (336, 448),
        (512, 512),
        (640, 480),
        (800, 600),
        (1024, 768),
        (300, 900),
        (1280, 720),
    ],
    "5 x 640x480": [(640, 480)] * 5,
}


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
    parser.add_argument("--no-in-tree", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={})
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    args.out.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    for encoder in args.encoders:
        architecture, _, backend = encoder.partition(":")
        records += run(architecture, backend or "FLASH_ATTN", args)
    (args.out / "summary.json").write_text(json.dumps(records, indent=1))


def run(
    architecture: str, backend: str, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One encoder: prints its table and returns its records."""
    import torch

    from vllm_encoder_cg.comparison import compare_case, markdown_table
    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )
    from vllm_encoder_cg.samples.checkpoints import ARCHITECTURES
    from vllm_encoder_cg.samples.encoder_inputs import image_batch

    modalities = ARCHITECTURES[architecture].modalities
    limits = {"image": 32, "video": 1}
    options = EncoderOptions(
        architecture=architecture,
        vision="released",
        backend=backend,
        dtype="bfloat16",
        max_tokens=args.max_tokens,
        settings=args.settings,
        engine={"limit_mm_per_prompt": {m: limits[m] for m in modalities}},
    )
    with captured_encoder(options) as manager:
        stats = manager.get_cumulative_stats()
        managers = {"ours": manager}
        if not args.no_in_tree:
            managers["in-tree"] = capture_in_tree(manager)
        rows = []
        for name, sizes in CASES.items():
            mm_kwargs = image_batch(manager.adapter, sizes, seed=1)
            batch = manager.adapter.parse(mm_kwargs)
            tokens = sum(spec.output_tokens for spec in batch.specs)
            rows.append(
                compare_case(
                    name,
                    manager.model,
                    mm_kwargs,
                    len(sizes),
                    tokens,
                    managers,
                    args.rounds,
                )
            )
        table = (
            f"{architecture}, {backend}, {torch.cuda.get_device_name()}: "
            f"{stats['num_budgets']} graphs, "
            f"{stats['graph_memory_bytes'] / 2**30:.2f} GiB, "
            f"{stats['capture_seconds']:.1f} s\n\n"
            f"{markdown_table(rows)}\n"
        )
        print(table, flush=True)
        (args.out / f"{architecture}-{backend}.md").write_text(table)
        managers.clear()
        manager.clear()
    return [
        {
            "architecture": architecture,
            "backend": backend,
            "device": torch.cuda.get_device_name(),
            "case": row.case,
            "items": row.items,
            "tokens": row.tokens,
            "way": way,
            "median_encoder_forward_ms": median,
            "p99_encoder_forward_ms": row.p99_ms[way],
        }
        for row in rows
        for way, median in row.median_ms.items()
    ]


def capture_in_tree(manager: Any) -> Any:
    """vLLM's own manager for the same model, captured with its defaults."""
    import torch
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    in_tree = EncoderCudaGraphManager(
        manager.vllm_config, manager.device, manager.dtype, manager.model
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        in_tree.capture(torch.cuda.graph_pool_handle())
    torch.cuda.synchronize()
    return in_tree


if __name__ == "__main__":
    main()
