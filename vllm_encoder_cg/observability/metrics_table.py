# SPDX-License-Identifier: Apache-2.0
"""The table that ``--cudagraph-metrics`` asks for, of the encoder.

vLLM prints one for the language model, at its logging interval.  This one has the
same columns and the path beside them, and is printed with each line of encoder
statistics; both count from one table to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.planning.plans import Plan

MAX_KINDS = 2000
"""Different rows that are kept apart; what comes later is one row."""
MAX_ROWS = 40
"""Rows that are printed, the most frequent ones."""

COLUMNS = (
    "Path",
    "Unpadded Tokens",
    "Padded Tokens",
    "Num Paddings",
    "Runtime Mode",
    "Count",
)


class _Row(NamedTuple):
    """One kind of replay or eager call."""

    path: str
    unpadded_tokens: int
    padded_tokens: int
    runtime_mode: str
    """``"FULL"`` or ``"NONE"``, as vLLM calls a full graph and no graph."""


class EncoderCudaGraphTable:
    """Collects plans and prints them."""

    def __init__(self) -> None:
        self._counts: Counter[_Row] = Counter()
        self._others = 0

    def add(self, plan: Plan, shapes: Mapping[GraphKey, GraphShape]) -> None:
        """Adds a plan as it was run."""
        for sub_batch in plan.sub_batches:
            for path, step in sub_batch.steps.items():
                if step.key is None:
                    row = _Row(path, step.tokens, step.tokens, "NONE")
                else:
                    capacity = shapes[step.key].capacity.tokens
                    row = _Row(path, step.tokens, capacity, "FULL")
                if row in self._counts or len(self._counts) < MAX_KINDS:
                    self._counts[row] += 1
                else:
                    self._others += 1

    def take(self, token_budgets: Mapping[str, list[int]]) -> str:
        """The table of what was added since the last one; empty: nothing was.

        Args:
            token_budgets: per path, those of the graphs.
        """
        if not self._counts:
            return ""
        ordered = sorted(self._counts.items(), key=lambda entry: (-entry[1], entry[0]))
        rows: list[tuple[str, ...]] = [
            (
                row.path,
                str(row.unpadded_tokens),
                str(row.padded_tokens),
                str(row.padded_tokens - row.unpadded_tokens),
                row.runtime_mode,
                str(count),
            )
            for row, count in ordered[:MAX_ROWS]
        ]
        rest = sum(count for _, count in ordered[MAX_ROWS:]) + self._others
        if rest:
            rows.append(("(others)", "", "", "", "", str(rest)))
        self._counts.clear()
        self._others = 0
        budgets = "\n".join(
            f"- Token budgets ({path}): {sorted(values)}"
            for path, values in token_budgets.items()
        )
        return (
            f"**Encoder CUDAGraph Config Settings:**\n\n{budgets}\n\n"
            f"**Encoder CUDAGraph Stats:**\n\n{_format(rows)}"
        )


def _format(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        padded = (cell.ljust(w) for cell, w in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |\n"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|\n"
    return line(COLUMNS) + rule + "".join(map(line, rows))
