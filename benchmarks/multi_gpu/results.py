# SPDX-License-Identifier: Apache-2.0
"""What was found: one JSON object a line, written as soon as it is known."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_SHORTEST_S = 10.0
"""With less time left, nothing is begun."""


@dataclass(frozen=True)
class Results:
    """A file that the parts, and the first rank in its own process, append to."""

    path: Path

    def add(self, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(describe(row), flush=True)

    def add_problem(self, part: str, what: str, problem: str) -> None:
        """Names a step that has no result, and why."""
        self.add({"part": part, "step": what, "problems": [problem]})

    def rows(self) -> list[Row]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@dataclass(frozen=True)
class TimeLimit:
    """Of a whole run, and of each step."""

    seconds: float
    step_seconds: float
    begin: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begin)

    @property
    def is_up(self) -> bool:
        return self.left < _SHORTEST_S

    @property
    def of_step(self) -> float:
        """Of a step that begins now."""
        return max(1.0, min(self.left, self.step_seconds))


NOT_BEGUN = "not begun: the time was up"


def is_wrong(row: Row) -> bool:
    return bool(row.get("problems")) or row.get("equal_tokens") is False


def describe(row: Row) -> str:
    """One line of the table."""
    if "exchange" in row:
        chosen = " (chosen)" if row.get("chosen") else ""
        return f"{row['exchange']:<44} {row['us']:9.0f} us{chosen}"
    if "mean_ms" in row:
        name = f"{row.get('encoder') or row['bench']}, {row['way']}"
        problems = "".join(f"; {problem}" for problem in row.get("problems", []))
        return (
            f"{name:<72} mean {row['mean_ms']:8.2f}  P99 {row['p99_ms']:8.2f} ms"
            f"{problems}"
        )
    if "equal_tokens" in row:
        tokens = "equal tokens" if row["equal_tokens"] else "OTHER TOKENS"
        problems = "".join(f"; {problem}" for problem in row["problems"])
        return (
            f"{row['engine']:<56} {tokens} in {row['equal_prompts']}; graphs by rank "
            f"{row['graphs_by_rank']}, hits {row['hits_by_rank']}{problems}"
        )
    if "replayed" in row:
        verdict = "; ".join(row["problems"][:3]) or "right"
        return (
            f"{row['encoder']:<56} as {row['mode']:<8} {row['batches']} batches, "
            f"error {row['error']:.1e}, {row['replayed']} items by graph, "
            f"{row['eager']} eagerly: {verdict}"
        )
    return f"{row['part']}, {row['step']}: {'; '.join(row['problems'])}"
