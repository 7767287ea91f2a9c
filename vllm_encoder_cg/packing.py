# SPDX-License-Identifier: Apache-2.0
"""Cutting a sorted run of items into sub-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from vllm_encoder_cg.costs import CostModel
from vllm_encoder_cg.definitions import EncoderItemSpec
from vllm_encoder_cg.fitting import GraphTable

Range = tuple[int, int]
"""Begin and end of a sub-batch within a run."""

# Trying every cut takes quadratic time: half a millisecond at 32 items.
_MAX_ITEMS_FOR_EVERY_CUT = 32


class Run:
    """Items that may share graphs, smallest first: equal axis keys, the same
    paths by graph.  Each of them fits a graph of each of those paths alone.

    Sums over consecutive items are differences of running sums.
    """

    def __init__(
        self,
        order: Sequence[int],
        specs: Sequence[EncoderItemSpec],
        tokens: Mapping[str, Sequence[int]],
        tables: Mapping[str, GraphTable],
    ) -> None:
        """
        Args:
            order: positions in the batch.
            tokens: per path, per position in the batch.
            tables: of the paths by graph; the others run eagerly.
        """
        self.order = tuple(order)
        self.tables = tables
        self.tokens = {
            path: _running([values[i] for i in order])
            for path, values in tokens.items()
        }
        """Per path, sums over the first n items; 0 first."""
        self._columns = [
            (
                table,
                self.tokens[path],
                [
                    _running([specs[i].demand.get(name, 0) for i in order])
                    for name in table.names
                ],
            )
            for path, table in tables.items()
        ]
        self._eager = [
            (path, sums) for path, sums in self.tokens.items() if path not in tables
        ]

    def __len__(self) -> int:
        return len(self.order)

    def fit(self, begin: int, end: int) -> list[int] | None:
        """Per path by graph, the smallest graph that holds the items from `begin`
        to `end`, -1 where they have nothing; None if some path has none."""
        picks = []
        for table, sums, extras in self._columns:
            tokens = sums[end] - sums[begin]
            if not tokens:
                picks.append(-1)
                continue
            pick = table.fit(tokens, end - begin, [e[end] - e[begin] for e in extras])
            if pick < 0:
                return None
            picks.append(pick)
        return picks

    def budgets(self, picks: Sequence[int]) -> int:
        """Sum of the budgets of the graphs that ``fit`` picked."""
        return sum(
            table.keys[pick].token_budget
            for (table, _, _), pick in zip(self._columns, picks, strict=True)
            if pick >= 0
        )

    def cost(self, begin: int, end: int, costs: CostModel) -> float | None:
        """Cost of the items from `begin` to `end` as one sub-batch; None if they
        do not fit together."""
        picks = self.fit(begin, end)
        if picks is None:
            return None
        cost = 0.0
        for (table, _, _), pick in zip(self._columns, picks, strict=True):
            if pick >= 0:
                cost += table.costs[pick]
        for path, sums in self._eager:
            if sums[end] > sums[begin]:
                cost += costs.eager_cost(path, sums[end] - sums[begin])
        return cost


def pack_greedily(run: Run) -> list[Range]:
    """Fills each sub-batch, smallest items first.

    A sub-batch ends before an item that does not fit, and before one that takes
    no smaller budgets alone than everything so far, if the two apart take
    smaller budgets than together.
    """
    cuts = [0]
    budgets = 0
    for end in range(1, len(run) + 1):
        begin = cuts[-1]
        together = run.fit(begin, end)
        merged = run.budgets(together) if together is not None else 0
        if end - begin > 1:
            picks = run.fit(end - 1, end)
            assert picks is not None  # every item of a run fits alone
            alone = run.budgets(picks)
            if together is None or (budgets <= alone and budgets + alone < merged):
                cuts.append(end - 1)
                merged = alone
        budgets = merged
    return list(pairwise([*cuts, len(run)]))


def pack_cheaply(run: Run, costs: CostModel, pooled: Mapping[str, int]) -> list[Range]:
    """The cheapest ranges found; the items outside of them join the items that
    are encoded eagerly together, of which there already are `pooled` tokens per
    path.

    Tried are, for each number of largest items to leave out, the cheapest cuts of
    the others, and then leaving out any single sub-batch.  Equal costs prefer
    fewer sub-batches, then graphs.
    """
    kept: list[Range] = []
    least = (math.inf, 0)
    for cost, ranges in reversed(_cheapest_prefixes(run, costs)):
        found = _total(run, costs, pooled, ranges, cost)
        if found < least or not kept:
            kept, least = ranges, found
    for candidate in reversed(kept):
        fewer = [r for r in kept if r != candidate]
        cost = sum(run.cost(*r, costs) or 0.0 for r in fewer)
        found = _total(run, costs, pooled, fewer, cost)
        if found < least:
            kept, least = fewer, found
    return kept


def _total(
    run: Run,
    costs: CostModel,
    pooled: Mapping[str, int],
    ranges: Sequence[Range],
    cost: float,
) -> tuple[float, int]:
    """Cost and number of sub-batches with everything outside `ranges` pooled."""
    pool = dict(pooled)
    for path, sums in run.tokens.items():
        kept = sum(sums[end] - sums[begin] for begin, end in ranges)
        pool[path] = pool.get(path, 0) + sums[-1] - kept
    eager = [costs.eager_cost(path, tokens) for path, tokens in pool.items() if tokens]
    return cost + sum(eager), len(ranges) + bool(eager)


def _cheapest_prefixes(run: Run, costs: CostModel) -> list[tuple[float, list[Range]]]:
    """For each way to leave out the largest items, the cheapest ranges found for
    the others with their cost; from no items to the whole run.

    Every cut is tried for short runs; the greedy cuts serve for longer ones, of
    which only whole sub-batches are left out.
    """
    if len(run) > _MAX_ITEMS_FOR_EVERY_CUT:
        return _greedy_prefixes(run, costs)
    best = [(0.0, 0)]
    origin = [0]
    for end in range(1, len(run) + 1):
        found: tuple[float, int] | None = None
        since = end - 1
        for begin in range(end - 1, -1, -1):
            cost = run.cost(begin, end, costs)
            if cost is None:
                break  # nor would more items fit
            candidate = (best[begin][0] + cost, best[begin][1] + 1)
            if found is None or candidate < found:
                found, since = candidate, begin
        assert found is not None  # every item of a run fits alone
        best.append(found)
        origin.append(since)
    prefixes = []
    for end, (cost, _) in enumerate(best):
        cuts = [end]
        while cuts[-1]:
            cuts.append(origin[cuts[-1]])
        prefixes.append((cost, list(pairwise(reversed(cuts)))))
    return prefixes


def _greedy_prefixes(run: Run, costs: CostModel) -> list[tuple[float, list[Range]]]:
    ranges = pack_greedily(run)
    totals = accumulate((run.cost(*r, costs) or 0.0 for r in ranges), initial=0.0)
    return [(cost, ranges[:count]) for count, cost in enumerate(totals)]


def _running(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))
