# SPDX-License-Identifier: Apache-2.0
"""Adds the benchmark results, which lie outside the docs, to the site."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

_LIST = "<!-- benchmark results -->"
_OVERVIEW = "<!-- benchmark overview -->"
_WAYS = ("eager", "in-tree", "floor")
_SHOWN = (".md", ".png", ".svg")


def runs() -> list[Path]:
    """Folders with results, the latest name first."""
    return sorted((path.parent for path in RESULTS.glob("*/README.md")), reverse=True)


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs with the files of the docs."""
    for run in runs():
        for path in sorted(run.iterdir()):
            if path.suffix in _SHOWN:
                files.append(
                    File.generated(
                        config,
                        f"results/{run.name}/{path.name}",
                        abs_src_path=str(path),
                    )
                )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page."""
    links = [f"- [{run.name}](results/{run.name}/README.md)" for run in runs()]
    return markdown.replace(
        _LIST, "\n".join(links) or "No results are kept with this version."
    ).replace(_OVERVIEW, overview(runs()))


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
            cells = [encoder, f"[{device}](results/{folder.name}/README.md)"]
            cells += [_ratios(cases, way) for way in _WAYS]
            lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return "No results are kept with this version."
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
