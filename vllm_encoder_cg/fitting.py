# SPDX-License-Identifier: Apache-2.0
"""Which graph holds a demand: the graphs of one path, smallest first."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from vllm_encoder_cg.costs import CostModel
from vllm_encoder_cg.definitions import GraphCapacity, GraphKey


class GraphTable:
    """The graphs of one path and one combination of axis keys, by capacity.

    A graph is named by its position: 0 is the smallest.
    """

    def __init__(
        self, graphs: Mapping[GraphKey, GraphCapacity], costs: CostModel | None
    ) -> None:
        ordered = sorted(
            graphs.items(), key=lambda entry: (entry[1].tokens, entry[0].token_budget)
        )
        self.keys = [key for key, _ in ordered]
        self.tokens = [capacity.tokens for _, capacity in ordered]
        self.items = [capacity.items for _, capacity in ordered]
        self.names = tuple(sorted({n for _, c in ordered for n in c.extra}))
        """Further demands that any of the graphs limits."""
        self._extra = [
            tuple(capacity.extra.get(name, sys.maxsize) for name in self.names)
            for _, capacity in ordered
        ]
        self.costs = [
            float(key.token_budget) if costs is None else costs.replay_cost(key)
            for key in self.keys
        ]
        """Cost of a replay; without a cost model the budget."""
        self._best_alone = self._find_best_alone()

    def fit(self, tokens: int, items: int, extra: Sequence[int]) -> int:
        """The smallest graph that holds a demand; -1 if none does.

        Args:
            extra: demands by the order of ``names``.
        """
        for position in range(bisect_left(self.tokens, tokens), len(self.tokens)):
            if items <= self.items[position] and all(
                map(int.__le__, extra, self._extra[position])
            ):
                return position
        return -1

    def best_alone(self, position: int, tokens: int) -> bool:
        """Whether no other graphs hold `tokens` tokens together for less than one
        replay of the graph at `position`.  May say no where it is so."""
        return self._best_alone[position] and (
            position == 0 or tokens > self.tokens[position - 1]
        )

    def _find_best_alone(self) -> list[bool]:
        # cheapest[k]: least cost of any number of graphs that together hold one
        # token more than graph k - 1 does.
        cheapest: list[float] = []
        alone = []
        for k, cost in enumerate(self.costs):
            needed = self.tokens[k - 1] + 1 if k else 1
            least = min(self.costs[k:])
            for i in range(k):
                rest = needed - self.tokens[i]
                least = min(
                    least, self.costs[i] + cheapest[bisect_left(self.tokens, rest)]
                )
            cheapest.append(least)
            alone.append(cost <= least)
        return alone
