# SPDX-License-Identifier: Apache-2.0
"""Options of whole engines that are compared.  Imports no torch."""

from __future__ import annotations

import json
from typing import Any


def shared_gpu_options(*, graphs: bool) -> dict[str, Any]:
    """Arguments of an engine that starts fast and beside others on a GPU: the text
    model is not what is looked at, and no engine may size itself by what is free.

    Args:
        graphs: whether the encoder has CUDA graphs.
    """
    compilation: dict[str, Any] = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    }
    if graphs:
        compilation["cudagraph_mm_encoder"] = True
    return {
        "compilation_config": compilation,
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.15,
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
