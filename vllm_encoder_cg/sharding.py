# SPDX-License-Identifier: Apache-2.0
"""Which rank encodes which items of a batch, where encoders are data parallel.

Pure functions of integers and of a cost table that all ranks share: every rank
computes the same assignment without asking another.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_encoder_cg.costs import CostModel
from vllm_encoder_cg.definitions import AxisKeys, EncoderItemSpec, GraphKey
from vllm_encoder_cg.planner import Plan, SubBatch


@dataclass(frozen=True)
class Assignment:
    """Every item of a batch on exactly one rank."""

    items: tuple[tuple[int, ...], ...]
    """Per rank, positions in the batch, ascending; a rank may have none."""
    tokens: tuple[int, ...]
    """Per rank, output tokens of its items together."""

    @property
    def order(self) -> list[int]:
        """Positions in the batch, rank after rank."""
        return [i for items in self.items for i in items]


def assign_items(
    specs: Sequence[EncoderItemSpec], ranks: int, weights: Sequence[float]
) -> Assignment:
    """Balances the weights: heaviest item first, each to the rank that has least.

    The heaviest rank then has at most 4/3 of what the best assignment would give
    it.  Ties go to the earlier item and the lower rank.

    Args:
        weights: per item, a finite number of at least 0.

    Raises:
        ValueError: `ranks` is below 1, or there is not one weight per item.
    """
    if ranks < 1:
        raise ValueError(f"ranks: got {ranks}; use at least 1")
    if len(weights) != len(specs):
        raise ValueError(f"weights: got {len(weights)} for {len(specs)} items")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # (weight, items, rank): items without weight spread, too.
    lightest: list[tuple[float, int, int]] = [(0.0, 0, rank) for rank in range(ranks)]
    for i in sorted(range(len(specs)), key=lambda i: -weights[i]):
        weight, count, rank = lightest[0]
        shares[rank].append(i)
        heapq.heapreplace(lightest, (weight + weights[i], count + 1, rank))
    return Assignment(
        tuple(tuple(sorted(share)) for share in shares),
        tuple(sum(specs[i].output_tokens for i in share) for share in shares),
    )


class ItemWeights:
    """What an item adds to the time of the rank that encodes it.

    Items share replays, so an item adds its tokens times what a token costs in
    the largest graph of its path and axis keys; one that no graph holds adds an
    eager forward of its own.  Without costs an item weighs its input size, as in
    the reference design.

    Args:
        keys: the graphs that all ranks try to capture.  Those that a rank could
            not are no part of it, because another rank would not know.
        costs: the same table on every rank.
    """

    def __init__(self, keys: Iterable[GraphKey], costs: CostModel | None) -> None:
        self._costs = costs
        largest: dict[tuple[str, AxisKeys], GraphKey] = {}
        for key in keys:
            known = largest.get((key.path, key.axis_keys))
            if known is None or known.token_budget < key.token_budget:
                largest[key.path, key.axis_keys] = key
        self._largest: Mapping[tuple[str, AxisKeys], GraphKey] = largest
        self._paths = tuple(dict.fromkeys(path for path, _ in largest))

    def __call__(self, specs: Sequence[EncoderItemSpec]) -> list[float]:
        """One weight per item."""
        if self._costs is None:
            return [float(spec.input_size) for spec in specs]
        return [self._weigh(spec, self._costs) for spec in specs]

    def _weigh(self, spec: EncoderItemSpec, costs: CostModel) -> float:
        weight = 0.0
        for path in self._paths:
            tokens = spec.get_path_output_tokens(path)
            if not tokens:
                continue
            eager = costs.eager_cost(path, tokens)
            key = self._largest.get((path, spec.axis_keys))
            if key is None or tokens > key.token_budget:
                weight += eager
                continue
            share = tokens / key.token_budget
            weight += min(eager, costs.replay_cost(key) * share)
        return weight


def place(plan: Plan, items: Sequence[int]) -> Plan:
    """A plan for some items of a batch, by their positions in the batch.

    Args:
        plan: made for these items alone.
        items: their positions, ascending.
    """
    return Plan(tuple(_place(sub_batch, items) for sub_batch in plan.sub_batches))


def _place(sub_batch: SubBatch, items: Sequence[int]) -> SubBatch:
    return replace(
        sub_batch,
        indices=tuple(items[i] for i in sub_batch.indices),
        eager_reasons={items[i]: why for i, why in sub_batch.eager_reasons.items()},
    )
