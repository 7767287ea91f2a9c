# SPDX-License-Identifier: Apache-2.0
"""What is printed of the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.mm_processor.workloads import WAYS


def describe(record: dict[str, Any]) -> str:
    return (
        f"{record['workload']}, {record['backend']}, {record['way']}: encoder_forward "
        f"mean {record['mean_encoder_forward_ms']:.2f} ms, "
        f"P99 {record['p99_encoder_forward_ms']:.2f} ms"
    )


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """A table: mean and P99 by way, and what ours saves."""
    lines = [
        "| workload | backend | | "
        + " | ".join(f"{way} (ms)" for way in WAYS)
        + " | ours / eager | ours / in-tree |",
        "|---|---|---|" + "---:|" * (len(WAYS) + 2),
    ]
    for (workload, backend), by_way in _by_run(records).items():
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


def verdict(records: Sequence[dict[str, Any]]) -> str:
    """Ours to the other ways, at most, and how fast engines started."""
    runs = _by_run(records)
    parts = [f"{len(records)} engines"]
    for other in ("eager", "in-tree"):
        for label in ("mean", "p99"):
            field = f"{label}_encoder_forward_ms"
            ratios = [
                ways["ours"][field] / ways[other][field]
                for ways in runs.values()
                if {"ours", other} <= set(ways)
            ]
            if ratios:
                parts.append(f"ours / {other} {label} {max(ratios):.3f} at most")
    starts = [r["start_seconds"] for r in records if r.get("start_seconds")]
    if starts:
        parts.append(f"started in {max(starts):.0f} s at most")
    return ", ".join(parts)


def _by_run(
    records: Sequence[dict[str, Any]],
) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Records by way, by workload and backend."""
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        of_run = runs.setdefault((record["workload"], record["backend"]), {})
        of_run[record["way"]] = record
    return runs
