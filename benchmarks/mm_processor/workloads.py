# SPDX-License-Identifier: Apache-2.0
"""What is encoded, and the command for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_encoder_cg.benchmarking.engine_options import as_options, shared_gpu_options

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
WAYS = ("eager", "in-tree", "ours")

REFERENCE_GRAPHS: dict[str, Any] = {
    "encoder_cudagraph_token_budgets": [
        *(512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864)
    ],
    "encoder_cudagraph_max_vision_items_per_batch": 8,
}
"""Of ``compilation_config``, with which vLLM's own graphs were published for 20 images
of 336x336 per request."""


@dataclass(frozen=True)
class Workload:
    """What is encoded."""

    prompts: int
    items: int
    """Images per prompt."""
    spread: float
    """The number of images is ``items * (1 +- spread)``."""
    buckets: dict[tuple[int, int], float]
    """(height, width) -> share."""
    in_tree: dict[str, Any] = field(default_factory=dict)
    """``compilation_config`` of vLLM's own graphs; empty: its defaults."""


WORKLOADS = {
    "mixed": Workload(200, 1, 0.0, {(480, 640): 0.5, (336, 336): 0.5}),
    "wide": Workload(
        200,
        2,
        0.5,
        {(224, 224): 0.25, (480, 640): 0.25, (768, 1024): 0.25, (1080, 1920): 0.25},
    ),
    "twenty": Workload(100, 20, 0.0, {(336, 336): 1.0}, REFERENCE_GRAPHS),
}


def command_line(
    name: str,
    way: str,
    *,
    backend: str | None,
    checkpoint: Path,
    output: Path,
    small: bool = False,
    prompts: int | None = None,
) -> Sequence[str]:
    """The options of ``vllm bench mm-processor``.

    Args:
        name: of the workload.
        output: the JSON file that it writes.
        small: for a sample with a small tower.
        prompts: instead of the workload's number.
    """
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs

    workload = WORKLOADS[name]
    count = prompts or workload.prompts
    options = engine_kwargs(ARCHITECTURE) | shared_gpu_options(graphs=way != "eager")
    if way == "in-tree":
        options["compilation_config"] |= workload.in_tree
    if way == "ours":
        # Whose last line says how much was encoded by graph.
        options["additional_config"] = {"encoder_cg": {"log_every_items": 10}}
    options |= {
        "model": checkpoint,
        "max_model_len": 2048 if small else 16384,
        "max_num_batched_tokens": 2048 if small else 16384,
        "mm_encoder_attn_backend": backend,
        **random_images(workload.items, workload.buckets, spread=workload.spread),
        "num_prompts": count,
        "num_warmups": max(2, count // 10),
        "output_json": output,
        "seed": 42,
    }
    return ["bench", "mm-processor", "--disable-tqdm", *as_options(options)]


def random_images(
    items: int, buckets: dict[tuple[int, int], float], *, spread: float = 0.0
) -> dict[str, Any]:
    """The options that say which images there are; fields as of ``Workload``.

    Videos are not allowed, since vLLM's own graphs on FLASHINFER are wrong with them.
    """
    limits = {"image": round(items * (1 + spread)), "video": 0}
    sizes = {(h, w, 1): share for (h, w), share in buckets.items()}
    return {
        "limit_mm_per_prompt": limits,
        "dataset_name": "random-mm",
        "random_input_len": 8,
        "random_output_len": 2,
        "random_mm_base_items_per_request": items,
        "random_mm_num_mm_items_range_ratio": spread,
        "random_mm_limit_mm_per_prompt": limits,
        "random_mm_bucket_config": str(sizes),
    }
