# SPDX-License-Identifier: Apache-2.0
"""Which graph holds a demand: the graphs of one group, smallest first."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from operator import ge, truediv

from vllm_encoder_cg.definitions import GraphCapacity, GraphKey
from vllm_encoder_cg.planning.costs import CostModel

_CLEARLY_CHEAPER = 0.98
"""By more than two measurements of the same time differ."""


class GraphTable:
    """The graphs of one group (``GraphKey.group``), by capacity.

    A graph is named by its position: 0 is the smallest.  Where a larger one was
    measured to take less time, its key is at the positions of both.
    """

    def __init__(
        self, graphs: Mapping[GraphKey, GraphCapacity], costs: CostModel
    ) -> None:
        ordered = sorted(
            graphs.items(), key=lambda entry: (entry[1].tokens, entry[0].token_budget)
        )
        self.keys = [key for key, _ in ordered]
        self.tokens = [capacity.tokens for _, capacity in ordered]
        self.names = tuple(sorted({n for _, c in ordered for n in c.extra}))
        """Further demands that any of the graphs limits."""
        self._limits = [
            (c.items, *(c.extra.get(name, sys.maxsize) for name in self.names))
            for _, c in ordered
        ]
        # Per limit, the least, and the least in proportion to tokens.
        self._tightest = [
            (
                min(limits),
                *min(
                    zip(limits, self.tokens, strict=True),
                    key=lambda pair: Fraction(*pair),
                ),
            )
            for limits in zip(*self._limits, strict=True)
        ]
        self.costs = [costs.replay_cost(key) for key in self.keys]
        """Cost of a replay."""
        self._use_cheaper_ones()
        # Up to each graph, the least cost of a token of capacity.
        self._rate = list(accumulate(map(truediv, self.costs, self.tokens), min))
        # Per graph, what one token more than the next smaller one holds costs at
        # least, and whether this graph is the cheapest way to hold it.
        self._floor: list[float] = []
        for k in range(len(self.costs)):
            needed = self.tokens[k - 1] + 1 if k else 1
            self._floor.append(min(min(self.costs[k:]), self._price_parts(k, needed)))
        self._best_alone = [
            cost <= floor for cost, floor in zip(self.costs, self._floor, strict=True)
        ]

    def _use_cheaper_ones(self) -> None:
        """Has a graph that holds as much in every respect stand for one that costs
        clearly more."""
        for k in reversed(range(len(self.keys))):
            for larger in range(k + 1, len(self.keys)):
                if self.costs[larger] < self.costs[k] * _CLEARLY_CHEAPER and all(
                    map(ge, self._limits[larger], self._limits[k])
                ):
                    self.keys[k], self.costs[k] = self.keys[larger], self.costs[larger]

    def fit(self, tokens: int, others: Sequence[int]) -> int:
        """The smallest graph that holds a demand; -1 if none does.

        Args:
            others: the number of items, then the demands in the order of
                ``names``; empty if they are known not to matter (``only_tokens``).
        """
        for position in range(bisect_left(self.tokens, tokens), len(self.tokens)):
            for needed, limit in zip(others, self._limits[position], strict=False):
                if needed > limit:
                    break
            else:
                return position
        return -1

    def only_tokens(
        self, tokens: Sequence[int], others: Sequence[Sequence[int]]
    ) -> bool:
        """Whether a graph that holds the tokens of any of these items together
        also holds whatever else they take.  May say no where it is so.

        Args:
            tokens: per item.
            others: per demand, in the order that ``fit`` takes them, per item.
        """
        return all(
            sum(demands) <= least
            or all(d * held <= limit * t for d, t in zip(demands, tokens, strict=True))
            for demands, (least, limit, held) in zip(
                others, self._tightest, strict=True
            )
        )

    def best_alone(self, position: int, tokens: int) -> bool:
        """Whether no other graphs hold `tokens` tokens, together or alone, for less
        than one replay of the graph at `position`.  May say no where it is so."""
        if position and tokens <= self.tokens[position - 1]:
            return False
        if self._best_alone[position]:
            return True
        cost = self.costs[position]
        return cost <= min(
            min(self.costs[position:]), self._price_parts(position, tokens)
        )

    def _price_parts(self, position: int, tokens: int) -> float:
        """What several graphs below `position` that together hold `tokens` tokens
        cost at least."""
        least = math.inf
        for i in range(position):
            # Graph i as the largest; what it leaves goes to graphs up to it.
            rest = tokens - self.tokens[i]
            floor = self._floor[bisect_left(self.tokens, rest)]
            least = min(least, self.costs[i] + max(floor, rest * self._rate[i]))
        return least
