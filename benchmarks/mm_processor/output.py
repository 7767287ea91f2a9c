# SPDX-License-Identifier: Apache-2.0
"""What ``vllm bench mm-processor`` leaves: its figures, and its engine's log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_ACTIVE = re.compile(r"vllm-encoder-cg \S+ active for")
_STATISTICS = re.compile(r"Encoder CUDA graphs: Items: (\d+), Hit rate: ([\d.]+)%")


def find_problem(way: str, log: str) -> str | None:
    """What is wrong where other graphs were active than those of `way`."""
    active = bool(_ACTIVE.search(log))
    if active == (way == "ours"):
        return None
    return f"this package's graphs are {'' if active else 'not '}active"


def read_results(path: Path, log: str) -> dict[str, Any]:
    """The figures of one engine, and what its log says of hits, if it does."""
    measured = json.loads(path.read_text())
    forward = measured["mm_processor_stats"]["encoder_forward_ms"]
    lines = _STATISTICS.findall(log)
    return {
        "prompts": measured["completed"],
        "mean_encoder_forward_ms": forward["mean"],
        "median_encoder_forward_ms": forward["median"],
        "p99_encoder_forward_ms": forward.get("p99") or forward["p99.0"],
        "hit_rate_percent": float(lines[-1][1]) if lines else None,
    }
