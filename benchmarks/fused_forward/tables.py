# SPDX-License-Identifier: Apache-2.0
"""What is printed of the report."""

from __future__ import annotations

import statistics
from typing import Any

_WAYS = ("plain", "fused", "floor", "fused exact")
_RATIOS = (("fused", "plain"), ("fused", "floor"), ("fused exact", "floor"))


def print_kernel_check(rows: list[dict[str, Any]]) -> None:
    """Per kernel and dtype, what ``kernels.checks`` found."""
    worst: dict[tuple[str, str], tuple[float, int, bool]] = {}
    for row in rows:
        key = row["kernel"], row["dtype"]
        error, count, ok = worst.get(key, (0.0, 0, True))
        worst[key] = max(error, row["error"]), count + 1, ok and row["ok"]
    for (kernel, dtype), (error, count, ok) in worst.items():
        mark = "ok" if ok else "WRONG"
        print(f"{kernel} {dtype}: {count} shapes, {error:.1e} at most, {mark}")


def print_details(found: dict[str, Any]) -> None:
    """Kernels, steps and errors of one encoder."""
    for problem in found["problems"]:
        print(problem)
    if "graphs" not in found:
        return
    print(
        f"\n{found['encoder']}: {found['graphs']}, auto: {found['auto']}, "
        f"one kernel attends up to {found['short_rows']} rows"
    )
    for name, profiles in found.get("profiles", {}).items():
        for way, rows in profiles.items():
            total = sum(row["us"] for row in rows)
            launches = sum(row["launches"] for row in rows)
            kinds: dict[str, list[float]] = {}
            for row in rows:
                kind = kinds.setdefault(row["kind"], [0.0, 0.0])
                kind[0] += row["launches"]
                kind[1] += row["us"]
            parts = ", ".join(
                f"{kind} {us:.0f} us ({count:.0f})"
                for kind, (count, us) in sorted(kinds.items(), key=lambda k: -k[1][1])
            )
            print(f"{name}, {way}: {total:.0f} us in {launches:.0f} launches: {parts}")
    for name, steps in found.get("steps", {}).items():
        parts = ", ".join(f"{step}: {ms:.3f} ms" for step, ms in steps.items())
        print(f"{name}, steps: {parts}")
    for name, errors in found.get("errors", {}).items():
        parts = ", ".join(f"{way} {error:.2e}" for way, error in errors.items())
        print(f"{name}, error against float64: {parts}")
    print(flush=True)


def overview(encoders: list[dict[str, Any]]) -> str:
    """All cases of all encoders, as a Markdown table."""
    names = ("encoder, case", "tokens", *_WAYS, *(f"{a} / {b}" for a, b in _RATIOS))
    lines = [f"| {' | '.join(names)} |", f"|---{'|---:' * (len(names) - 1)}|"]
    for found in encoders:
        ratios: dict[str, list[float]] = {}
        for row in found["cases"]:
            ms = row["median_ms"]
            cells = [f"{ms[w]:.2f}" if w in ms else "" for w in _WAYS]
            for first, second in _RATIOS:
                of_pair = ratios.setdefault(f"{first}/{second}", [])
                if second in ms:
                    of_pair.append(ms[first] / ms[second])
                    cells.append(f"{of_pair[-1]:.3f}")
                else:
                    cells.append("")
            lines.append(f"| {row['case']} | {row['tokens']} | {' | '.join(cells)} |")
        means = [
            f"{statistics.geometric_mean(values):.3f}" if values else ""
            for values in ratios.values()
        ]
        lines.append(
            f"| {found['encoder']}, mean |  |  |  |  |  | {' | '.join(means)} |"
        )
    return "\n".join(lines)


def verdict(report: dict[str, Any]) -> str:
    """The kernels that are right, and fused / floor of each encoder."""
    parts = []
    if report["kernels"]:
        right = sum(row["ok"] for row in report["kernels"])
        parts.append(f"{right} of {len(report['kernels'])} kernel checks right")
    for found in report["encoders"]:
        ratios = [
            row["median_ms"]["fused"] / row["median_ms"]["floor"]
            for row in found["cases"]
            if "floor" in row["median_ms"]
        ]
        if ratios:
            parts.append(
                f"{found['encoder']} fused / floor "
                f"{statistics.geometric_mean(ratios):.3f} ({max(ratios):.3f})"
            )
    return ", ".join(parts) or "nothing measured"
