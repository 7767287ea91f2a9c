# SPDX-License-Identifier: Apache-2.0
"""Which token budgets cost least for a given distribution of demands.

A demand is the number of output tokens that one replay has to hold.  It takes the
smallest budget that holds it, or an eager forward where that is cheaper or no
budget does.  Costs that rise with tokens make the best choice a shortest path over
candidate budgets, found exactly by dynamic programming.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

Cost = Callable[[int], float]
"""Of a number of tokens, at least 1; finite, and not lower for more tokens.  Where a
larger graph is faster, the cost of the fastest that holds the tokens is."""

_MAX_CANDIDATES = 2048
"""Each further one makes the search slower, and a grid of so many points is finer than
any padding that shows."""


@dataclass(frozen=True)
class Demands:
    """What the replays of one path have to hold, and what holding it costs."""

    weights: Mapping[int, float]
    """Tokens -> how often; tokens of at least 1, weights of at least 0."""
    replay_cost: Cost
    """Of a graph, by its budget."""
    eager_cost: Cost
    """By the tokens of the demand."""


@dataclass(frozen=True)
class GraphMemory:
    """Device memory that the graphs of a model take.

    The largest graph takes nearly all of it, since the others share its storage.
    """

    bytes_per_token: float
    """Of the largest budget."""
    bytes_per_graph: float = 0.0

    def bytes_of(self, largest: int, graphs: int) -> float:
        """For `graphs` graphs of up to `largest` tokens."""
        return self.bytes_per_token * largest + self.bytes_per_graph * graphs


@dataclass(frozen=True)
class Limits:
    """What the budgets have to respect."""

    max_graphs: int
    smallest: int = 1
    """No budget is below it."""
    largest: int | None = None
    """No budget is above it; larger demands are eager."""
    keep_largest: bool = False
    """Whether `largest` must be a budget, for demands that were not recorded."""
    granularity: int = 1
    """Budgets are multiples of it, `smallest` and `largest` excepted."""
    memory: GraphMemory | None = None
    memory_bytes: float = math.inf


@dataclass(frozen=True)
class Choice:
    """The budgets that cost least."""

    budgets: tuple[int, ...]
    """Ascending; empty where nothing by graph is cheaper, or allowed."""
    cost: float
    """Of all demands."""


def choose_budgets(demands: Sequence[Demands], limits: Limits) -> Choice:
    """The cheapest budgets for all paths, which have one list in common.

    Exact over the candidates: every demand rounded up to the granularity.  Where
    those are more than 2048, the granularity is doubled until they are not.  Of
    equally cheap choices, one with the fewest budgets is taken.

    Raises:
        ValueError: a limit is not positive, `smallest` is above `largest`, or
            `keep_largest` without `largest`.
    """
    _check(limits)
    candidates = _candidates(demands, limits)
    tables = [_CostTable(of_path, candidates) for of_path in demands]

    def between(low: int, high: int) -> float:
        """Of the demands above candidate `low` and up to `high`, by the graph of
        `high`; candidates are counted from 1, and 0 is none."""
        return sum(table.between(low, high) for table in tables)

    def total(held: Sequence[float], last: int) -> float:
        return held[last] + sum(table.eager_above(last) for table in tables)

    count = len(candidates)
    ends = [count] if limits.keep_largest else range(1, count + 1)
    best_cost = math.inf if limits.keep_largest and count else total([0.0], 0)
    best: tuple[int, int] | None = None
    held = [0.0, *(between(0, j) for j in range(1, count + 1))]
    parents: list[list[int]] = [[0] * (count + 1)]
    for graphs in range(1, min(limits.max_graphs, count) + 1):
        if graphs > 1:
            held, parent = _add_graph(held, between)
            parents.append(parent)
        for last in ends:
            if _fits(limits, candidates[last - 1], graphs):
                cost = total(held, last)
                if cost < best_cost:
                    best_cost, best = cost, (graphs, last)
    if best is None:
        return Choice((), total([0.0], 0))
    return Choice(_trace_back(parents, candidates, *best), best_cost)


def _check(limits: Limits) -> None:
    for name in ("max_graphs", "smallest", "granularity"):
        if getattr(limits, name) < 1:
            raise ValueError(f"{name}: got {getattr(limits, name)}; use at least 1")
    if limits.largest is not None and limits.largest < limits.smallest:
        raise ValueError(
            f"largest: got {limits.largest}, below the smallest budget allowed, "
            f"{limits.smallest}"
        )
    if limits.keep_largest and limits.largest is None:
        raise ValueError("keep_largest: needs a largest budget")


def _candidates(demands: Sequence[Demands], limits: Limits) -> list[int]:
    """Ascending.  No other budget can be better: lowered to the largest demand
    that it holds, it holds the same."""
    tokens = {t for of_path in demands for t, w in of_path.weights.items() if w > 0}
    step = limits.granularity
    while True:
        found = set()
        for t in tokens:
            candidate = max(-(-t // step) * step, limits.smallest)
            if limits.largest is not None and candidate > limits.largest:
                # The largest itself may hold what its multiple would not.
                if t > limits.largest:
                    continue
                candidate = limits.largest
            found.add(candidate)
        if limits.keep_largest and limits.largest is not None:
            found.add(limits.largest)
        if len(found) <= _MAX_CANDIDATES:
            return sorted(found)
        step *= 2


class _CostTable:
    """What ranges of one path's demands cost, by sums over smaller demands."""

    def __init__(self, demands: Demands, candidates: Sequence[int]) -> None:
        tokens = sorted(t for t, weight in demands.weights.items() if weight > 0)
        weights = [demands.weights[t] for t in tokens]
        eager = [demands.eager_cost(t) for t in tokens]
        self._weight = [0.0, *accumulate(weights)]
        self._eager = [
            0.0,
            *accumulate(w * c for w, c in zip(weights, eager, strict=True)),
        ]
        self._replay = [0.0, *(demands.replay_cost(c) for c in candidates)]
        # Per candidate, the demands that it holds, and of those that are cheaper
        # eagerly: the smallest ones, as their cost rises.
        self._held = [0, *(bisect_right(tokens, c) for c in candidates)]
        self._cheaper = [bisect_left(eager, cost) for cost in self._replay]

    def between(self, low: int, high: int) -> float:
        begin, end = self._held[low], self._held[high]
        middle = min(max(self._cheaper[high], begin), end)
        eager = self._eager[middle] - self._eager[begin]
        return eager + self._replay[high] * (self._weight[end] - self._weight[middle])

    def eager_above(self, candidate: int) -> float:
        return self._eager[-1] - self._eager[self._held[candidate]]


def _add_graph(
    held: Sequence[float], between: Callable[[int, int], float]
) -> tuple[list[float], list[int]]:
    """From the least costs of holding everything up to each candidate to those with
    one graph more, and the candidate below the last.

    The best candidate below moves up with the last one (a larger graph costs a
    small demand more), so each half of the candidates searches half of the range.
    """
    count = len(held) - 1
    result, parent = list(held), list(range(count + 1))
    pending = [(1, count, 0, count - 1)]
    while pending:
        first, last, low, high = pending.pop()
        if first > last:
            continue
        middle = (first + last) // 2
        least, at = math.inf, low
        for below in range(low, min(high, middle - 1) + 1):
            cost = held[below] + between(below, middle)
            if cost < least:
                least, at = cost, below
        result[middle], parent[middle] = least, at
        pending.append((first, middle - 1, low, at))
        pending.append((middle + 1, last, at, high))
    return result, parent


def _fits(limits: Limits, largest: int, graphs: int) -> bool:
    if limits.memory is None:
        return True
    return limits.memory.bytes_of(largest, graphs) <= limits.memory_bytes


def _trace_back(
    parents: Sequence[Sequence[int]], candidates: Sequence[int], graphs: int, last: int
) -> tuple[int, ...]:
    budgets = []
    while graphs and last:
        budgets.append(candidates[last - 1])
        last = parents[graphs - 1][last]
        graphs -= 1
    return tuple(reversed(budgets))
