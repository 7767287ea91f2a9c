# SPDX-License-Identifier: Apache-2.0
"""What the docs say of the benchmark results that are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

LINK = "../benchmarks/results/"
"""From a page to the results, as they lie in the repository."""

_WAYS = ("eager", "in-tree", "floor")


def runs() -> list[Path]:
    """Folders with results, the latest name first."""
    return sorted((path.parent for path in RESULTS.glob("*/README.md")), reverse=True)


def listing() -> str:
    """A link to each run."""
    return "\n".join(f"- [{run.name}]({LINK}{run.name}/README.md)" for run in runs())


def overview(folders: Sequence[Path]) -> str:
    """Our worst and mean ratios, per encoder, of the runs of ``encoder_latency.py``
    and ``vllm-encoder-cg bench``."""
    lines = []
    for folder in folders:
        file = folder / "summary.json"
        records = json.loads(file.read_text()) if file.is_file() else []
        encoders: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
        for record in records:
            if record.get("kind") == "cases":
                key = f"`{record['architecture']}`, {record['backend']}"
                cases = encoders.setdefault((key, record["device"]), {})
                times = cases.setdefault(record["case"], {})
                times[record["way"]] = record["median_encoder_forward_ms"]
        for (encoder, device), cases in encoders.items():
            cells = [encoder, f"[{device}]({LINK}{folder.name}/README.md)"]
            cells += [_ratios(cases, way) for way in _WAYS]
            lines.append(f"| {' | '.join(cells)} |")
    head = [
        "| encoder | run on | " + " | ".join(f"ours / {w}" for w in _WAYS) + " |",
        "|---|---|" + "---:|" * len(_WAYS),
    ]
    return "\n".join([*head, *lines])


def _ratios(cases: dict[str, dict[str, float]], way: str) -> str:
    ratios = [
        times["ours"] / times[way]
        for times in cases.values()
        if {"ours", way} <= set(times)
    ]
    if not ratios:
        return ""
    return f"{geometric_mean(ratios):.3f} ({max(ratios):.3f})"
