# SPDX-License-Identifier: Apache-2.0
"""Cutting a sorted run of items into sub-batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from vllm_encoder_cg.definitions import EncoderItemSpec
from vllm_encoder_cg.planning.costs import CostModel, TokenCosts
from vllm_encoder_cg.planning.fitting import GraphTable

Range = tuple[int, int]
"""Begin and end of a sub-batch within a run."""

_MAX_ITEMS_FOR_EVERY_CUT = 64
"""Trying every cut takes quadratic time: about a millisecond for so many images."""

_TOKENS_PER_REPLAY = TokenCosts().per_replay


class Run:
    """Items that may share graphs, smallest first: equal axis keys, the same
    paths by graph.  Each of them alone fits a graph of each of those paths.

    Sums over consecutive items are differences of running sums.
    """

    def __init__(
        self,
        order: Sequence[int],
        specs: Sequence[EncoderItemSpec],
        tokens: Mapping[str, Sequence[int]],
        tables: Mapping[str, GraphTable],
        costs: CostModel,
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
        self.costs = costs
        self._columns = []
        for path, table in tables.items():
            others = [[1] * len(order)]
            for name in table.names:
                others.append([specs[i].demand.get(name, 0) for i in order])
            if table.only_tokens([tokens[path][i] for i in order], others):
                others = []
            sums = [_running(demands) for demands in others]
            self._columns.append((table, self.tokens[path], sums))
        self._eager = [
            (path, sums) for path, sums in self.tokens.items() if path not in tables
        ]

    def __len__(self) -> int:
        return len(self.order)

    def fit(self, begin: int, end: int) -> list[int] | None:
        """Per path by graph, the smallest graph that holds the items from `begin`
        to `end`, -1 where they have nothing; None if some path has none."""
        positions = []
        for table, sums, others in self._columns:
            position = -1
            if tokens := sums[end] - sums[begin]:
                position = table.fit(tokens, [o[end] - o[begin] for o in others])
                if position < 0:
                    return None
            positions.append(position)
        return positions

    def budgets(self, begin: int, end: int) -> int | None:
        """Sum of the budgets of the items from `begin` to `end` as one sub-batch;
        None if they do not fit together."""
        positions = self.fit(begin, end)
        if positions is None:
            return None
        return sum(
            column[0].keys[position].token_budget
            for column, position in zip(self._columns, positions, strict=True)
            if position >= 0
        )

    def cost(self, begin: int, end: int) -> float | None:
        """Cost of the items from `begin` to `end` as one sub-batch; None if they
        do not fit together."""
        positions = self.fit(begin, end)
        if positions is None:
            return None
        cost = 0.0
        for column, position in zip(self._columns, positions, strict=True):
            if position >= 0:
                cost += column[0].costs[position]
        for path, sums in self._eager:
            if tokens := sums[end] - sums[begin]:
                cost += self.costs.eager_cost(path, tokens)
        return cost

    def costs_until(self, end: int) -> list[float]:
        """``cost(begin, end)`` for `begin` from ``end - 1`` downwards, as far as
        the items fit together."""
        if not self._eager and not any(others for _, _, others in self._columns):
            # Only tokens matter, as in most batches; planning spends its time here.
            by_column = []
            for table, sums, _ in self._columns:
                held, costs, total = table.tokens, table.costs, sums[end]
                first = bisect_left(sums, total - held[-1])
                by_column.append(
                    [
                        costs[bisect_left(held, total - before)]
                        if before < total
                        else 0.0
                        for before in sums[first:end][::-1]
                    ]
                )
            return list(map(sum, zip(*by_column, strict=False)))
        found = []
        for begin in range(end - 1, -1, -1):
            cost = self.cost(begin, end)
            if cost is None:
                break  # nor would more items fit
            found.append(cost)
        return found


def pack_greedily(run: Run) -> list[Range]:
    """Fills each sub-batch, smallest items first.

    A sub-batch ends before an item that does not fit, and before one that takes
    no smaller budgets alone than everything so far, if apart the two take smaller
    budgets than together by more than a replay's fixed cost is worth.
    """
    cuts = [0]
    before = 0
    for end in range(1, len(run) + 1):
        together = run.budgets(cuts[-1], end)
        if end - 1 > cuts[-1]:
            alone = run.budgets(end - 1, end)
            assert alone is not None  # every item of a run fits alone
            if together is None or (
                before <= alone and before + alone + _TOKENS_PER_REPLAY < together
            ):
                cuts.append(end - 1)
                together = alone
        assert together is not None
        before = together
    return list(pairwise([*cuts, len(run)]))


class _Prefix(NamedTuple):
    """The cheapest way found to cut the first n items of a run."""

    cost: float
    parts: int
    """Sub-batches."""
    since: int
    """Where the last of them begins."""


def pack_cheaply(run: Run, pooled: Mapping[str, int]) -> list[Range]:
    """The cheapest ranges found; items outside of them are to join those that
    are encoded eagerly together, which already have `pooled` tokens per path.

    Tried are, for each number of largest items to leave out, the cheapest cuts of
    the others, and then leaving out any one of their sub-batches too.  Equal costs
    prefer fewer sub-batches, then graphs.
    """
    if len(run) <= _MAX_ITEMS_FOR_EVERY_CUT:
        prefixes = _every_cut(run)
    else:
        prefixes = _greedy_cuts(run)

    def pool_cost(end: int, ranges: Sequence[Range] = ()) -> tuple[float, int]:
        """Cost and number of sub-batches of the items from `end` on and those of
        `ranges` in the pool."""
        cost = 0.0
        count = 0
        for path, sums in run.tokens.items():
            left = pooled.get(path, 0) + sums[-1] - sums[end]
            left += sum(sums[stop] - sums[start] for start, stop in ranges)
            if left:
                cost += run.costs.eager_cost(path, left)
                count = 1
        return cost, count

    least, chosen = None, 0
    for end in reversed(prefixes):
        cost, count = pool_cost(end)
        found = (prefixes[end].cost + cost, prefixes[end].parts + count)
        if least is None or found < least:
            least, chosen = found, end

    ranges: list[Range] = []
    end = chosen
    while end:
        ranges.append((prefixes[end].since, end))
        end = prefixes[end].since
    kept = ranges[::-1]
    for candidate in ranges:
        others = [r for r in ranges if r != candidate]
        cost, count = pool_cost(chosen, [candidate])
        found = (cost + sum(run.cost(*r) or 0.0 for r in others), count + len(others))
        if least is None or found < least:
            least, kept = found, others[::-1]
    return kept


def _every_cut(run: Run) -> dict[int, _Prefix]:
    """The cheapest cuts of every prefix, by its length, ascending."""
    totals = [0.0]
    parts = [0]
    since = [0]
    for end in range(1, len(run) + 1):
        found = list(map(add, reversed(totals), run.costs_until(end)))
        least = min(found)
        begins = [end - 1 - i for i, total in enumerate(found) if total == least]
        begin = min(begins, key=parts.__getitem__)
        totals.append(least)
        parts.append(parts[begin] + 1)
        since.append(begin)
    return {
        n: _Prefix(*p) for n, p in enumerate(zip(totals, parts, since, strict=True))
    }


def _greedy_cuts(run: Run) -> dict[int, _Prefix]:
    """The greedy cuts, by the lengths of the prefixes that they end, unless one
    sub-batch costs less."""
    prefixes = {0: _Prefix(0.0, 0, 0)}
    for begin, end in pack_greedily(run):
        before = prefixes[begin]
        cost = run.cost(begin, end) or 0.0
        prefixes[end] = _Prefix(before.cost + cost, before.parts + 1, begin)
    whole = run.cost(0, len(run))
    if whole is not None and whole < prefixes[len(run)].cost:
        prefixes[len(run)] = _Prefix(whole, 1, 0)
    return prefixes


def _running(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))
