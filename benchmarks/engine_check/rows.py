# SPDX-License-Identifier: Apache-2.0
"""What the engines found, one row per engine with graphs."""

from __future__ import annotations

from typing import Any

MEMORY_TOLERANCE = 0.05
"""Of what is reported, how far it may be from what is given back."""


def name_of(job: dict[str, Any]) -> str:
    """Of one engine."""
    flag = "with graphs" if job["graphs"] else "without"
    return f"{job['architecture']}, {job['runner']}, {flag}"


def rows_of(
    found: dict[str, dict[str, Any]], *, only_graphs: bool
) -> list[dict[str, Any]]:
    """One row per engine with graphs, once the one without has run, too."""
    rows = []
    for given in list(found.values()):
        if given["job"]["graphs"]:
            without = name_of(given["job"] | {"graphs": False})
            if only_graphs or without in found:
                rows.append(compare(given if only_graphs else found[without], given))
    return rows


def memory_problems(memory: dict[str, float] | None) -> list[str]:
    """What is wrong with memory that is reported as `reported` and was `freed`."""
    if memory is None:
        return ["memory was not measured"]
    off = abs(memory["reported"] / max(memory["freed"], 1) - 1)
    if off <= MEMORY_TOLERANCE:
        return []
    return [f"graph memory is {off:.1%} off: {memory}"]


def describe(row: dict[str, Any]) -> str:
    """A few words."""
    if "stages" not in row:
        return f"{row['runner']} failed"
    text = f"{row['runner']}: {row['graph_hits']} hits, {len(row['stages'])} stages"
    if row["memory"]:
        reported, freed = row["memory"]["reported"], row["memory"]["freed"]
        text += f", {reported / 2**30:.2f} GiB reported, {freed / 2**30:.2f} given back"
    return f"{text}, started in {row['seconds']} s"


def compare(without: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """One row: an engine with graphs beside the same without."""
    job = given["job"]
    errors = dict.fromkeys(each["error"] for each in (without, given))
    problems = [error for error in errors if error]
    row: dict[str, Any] = {
        "architecture": job["architecture"],
        "runner": job["runner"],
        "problems": problems,
    }
    if problems:
        return row
    for stage, tokens in given["tokens"].items():
        if tokens != without["tokens"]["first"]:
            equal = sum(a == b for a, b in zip(tokens, without["tokens"]["first"]))  # noqa: B905
            problems.append(f"{stage}: {equal} of {len(tokens)} prompts equal")
    if not given["stats"].get("graph_hits"):
        problems.append("no item was encoded by graph")
    row |= {k: given[k] for k in ("seconds", "memory", "stages")}
    row |= {k: given["stats"].get(k) for k in ("graph_hits", "graph_misses")}
    return row
