# SPDX-License-Identifier: Apache-2.0
"""What the manager counts.  One item is one count, whatever its paths did.

These counts are the only ones: log lines, ``get_cumulative_stats()``, the table of
``--cudagraph-metrics`` and Prometheus all show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.definitions import EagerReason, GraphKey
from vllm_encoder_cg.planning.plans import Plan


@dataclass
class EncoderStats:
    """Counts since start, and the graphs that there are."""

    hits: int = 0
    """Items whose every path was replayed."""
    misses: Counter[EagerReason] = field(default_factory=Counter)
    """Items of which at least one path was not, by the reason of the first."""
    replays: Counter[GraphKey] = field(default_factory=Counter)
    eager_calls: int = 0
    real_tokens: int = 0
    """Output tokens of replays that belong to items."""
    padded_tokens: int = 0
    """Output tokens that replays computed beyond those."""
    batches: int = 0
    replay_seconds: float = 0.0
    """Time of all replays, filling and reading the buffers included, estimated from
    the batches that ``StepTimer`` timed."""
    eager_seconds: float = 0.0
    """Likewise of encoding without a graph."""
    timed_batches: int = 0
    graphs: int = 0
    """Graphs in use now."""
    graph_memory_bytes: int = 0

    @property
    def items(self) -> int:
        return self.hits + self.misses.total()

    def count_plan(
        self, plan: Plan, shapes: Mapping[GraphKey, GraphShape], *, batches: int = 1
    ) -> None:
        """Adds a plan as it was run.

        Args:
            shapes: of the graphs; one of whole rows or tiles computes more tokens
                than its budget.
            batches: 0 where another rank counts the batch of which this is a share.
        """
        self.batches += batches
        for sub_batch in plan.sub_batches:
            for step in sub_batch.steps.values():
                if step.key is None:
                    self.eager_calls += 1
                    continue
                self.replays[step.key] += 1
                self.real_tokens += step.tokens
                self.padded_tokens += shapes[step.key].capacity.tokens - step.tokens
            reasons = sub_batch.eager_reasons
            if reasons:
                self.misses.update(reasons.values())
            self.hits += len(sub_batch.indices) - len(reasons)

    def count_refused(
        self, items: int = 1, reason: EagerReason = EagerReason.UNSUPPORTED_INPUT
    ) -> None:
        """Adds a batch that vLLM's own path encodes instead."""
        self.batches += 1
        self.eager_calls += 1
        self.misses[reason] += items

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for ``get_cumulative_stats``."""
        misses = self.misses.total()
        computed = self.real_tokens + self.padded_tokens
        return {
            "graph_hits": self.hits,
            "graph_misses": misses,
            "hit_rate": self.hits / self.items if self.items else 0.0,
            "items": self.items,
            "batches": self.batches,
            "eager_calls": self.eager_calls,
            "misses_by_reason": {
                reason.value: self.misses[reason] for reason in EagerReason
            },
            "real_tokens": self.real_tokens,
            "padded_tokens": self.padded_tokens,
            "padding_rate": self.padded_tokens / computed if computed else 0.0,
            "replays_by_graph": {
                str(key): count
                for key, count in sorted(
                    self.replays.items(),
                    key=lambda entry: (entry[0].path, entry[0].token_budget),
                )
            },
            "replays_by_budget": self.replays_by_budget(),
            "replay_seconds": self.replay_seconds,
            "eager_seconds": self.eager_seconds,
            "timed_batches": self.timed_batches,
            "num_budgets": self.graphs,
            "graph_memory_bytes": self.graph_memory_bytes,
        }

    def replays_by_budget(self) -> dict[str, dict[int, int]]:
        """Per path, replays by token budget, ascending; axis keys summed up."""
        sums: dict[str, Counter[int]] = {}
        # A copy, as another thread may be adding a key.
        for key, count in dict(self.replays).items():
            sums.setdefault(key.path, Counter())[key.token_budget] += count
        return {path: dict(sorted(of_path.items())) for path, of_path in sums.items()}

    def log_line(self) -> str:
        """One line, in the form of vLLM's periodic ones."""
        values = self.as_dict()
        reasons = ", ".join(
            f"{name}: {count}"
            for name, count in values["misses_by_reason"].items()
            if count
        )
        return (
            f"Encoder CUDA graphs: Items: {values['items']}, "
            f"Hit rate: {values['hit_rate']:.1%}, Misses: {values['graph_misses']}"
            f"{f' ({reasons})' if reasons else ''}, "
            f"Replays: {self.replays.total()}, Eager calls: {values['eager_calls']}, "
            f"Padding: {values['padding_rate']:.1%} of replayed tokens, "
            f"Replay time: {self.replay_seconds:.1f} s, "
            f"Eager time: {self.eager_seconds:.1f} s"
        )
