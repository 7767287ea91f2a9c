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
    most = round(workload.items * (1 + workload.spread))
    buckets = {(h, w, 1): share for (h, w), share in workload.buckets.items()}
    options = engine_kwargs(ARCHITECTURE) | shared_gpu_options(graphs=way != "eager")
    if way != "eager":
        options["compilation_config"] |= workload.compilation_config
    if way == "ours":
        # Whose last line says how much was encoded by graph.
        options["additional_config"] = {"encoder_cg": {"log_every_items": 10}}
    options |= {
        "model": checkpoint,
        "max_model_len": 2048 if small else 16384,
        "max_num_batched_tokens": 2048 if small else 16384,
        "limit_mm_per_prompt": {"image": most, "video": 0},
        "mm_encoder_attn_backend": backend,
        "dataset_name": "random-mm",
        "num_prompts": count,
        "num_warmups": max(2, count // 10),
        "random_input_len": 8,
        "random_output_len": 2,
        "random_mm_base_items_per_request": workload.items,
        "random_mm_num_mm_items_range_ratio": workload.spread,
        "random_mm_limit_mm_per_prompt": {"image": most, "video": 0},
        "random_mm_bucket_config": str(buckets),
        "output_json": output,
        "seed": 42,
    }
    return ["bench", "mm-processor", "--disable-tqdm", *as_options(options)]
