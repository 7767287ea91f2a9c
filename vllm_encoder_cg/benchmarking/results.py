# SPDX-License-Identifier: Apache-2.0
"""What was measured of one encoder.  Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_encoder_cg.benchmarking.timing import CaseTimes

OURS, IN_TREE, EAGER, FLOOR = "ours", "in-tree", "eager", "floor"
"""The ways in which an encoder is timed."""


@dataclass
class GraphCost:
    """What a manager's graphs took to make."""

    graphs: int
    memory_bytes: int
    seconds: float
    memory_limit_bytes: float | None = None
    """What the memory was to stay within; None: no limit."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the start-up, in order."""

    def as_dict(self) -> dict[str, Any]:
        """Flat."""
        return {
            "graph_graphs": self.graphs,
            "graph_memory_bytes": self.memory_bytes,
            "graph_memory_limit_bytes": self.memory_limit_bytes,
            "graph_seconds": self.seconds,
            **{f"graph_seconds_{name}": s for name, s in self.phases.items()},
        }


@dataclass
class EncoderBenchmark:
    """Everything that was measured of one encoder."""

    about: dict[str, Any]
    """Architecture, backend, device, versions: equal for all cases."""
    graphs: dict[str, GraphCost] = field(default_factory=dict)
    """By way."""
    cases: list[CaseTimes] = field(default_factory=list)
    growth: list[CaseTimes] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For files: no blanks in it."""
        name = f"{self.about['architecture']}-{self.about['backend']}"
        return re.sub(r"[^\w.-]+", "_", name)

    def records(self) -> list[dict[str, Any]]:
        """One flat record per case and way, as ``vllm bench sweep plot`` reads."""
        records = []
        for kind, rows in (("cases", self.cases), ("growth", self.growth)):
            for row in rows:
                for way, median in row.median_ms.items():
                    graphs = self.graphs.get(way)
                    records.append(
                        self.about
                        | {
                            "kind": kind,
                            "case": row.case,
                            "items": row.items,
                            "tokens": row.tokens,
                            "way": way,
                            "median_encoder_forward_ms": median,
                            "p99_encoder_forward_ms": row.p99_ms[way],
                            "padding": row.padding.get(way),
                            "floor_of": row.floor_kind if way == FLOOR else None,
                        }
                        | (graphs.as_dict() if graphs else {})
                    )
        return records
