# SPDX-License-Identifier: Apache-2.0
"""Which rank encodes which items of a batch, where encoders are data parallel.

Pure functions of integers and of rates that all ranks share: every rank computes
the same assignment without asking another.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_encoder_cg.definitions import EncoderItemSpec
from vllm_encoder_cg.planning.plans import Plan, SubBatch


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
    specs: Sequence[EncoderItemSpec],
    ranks: int,
    weights: Sequence[float],
    late_by: Sequence[float] | None = None,
) -> Assignment:
    """Balances the weights: heaviest item first, each to the rank that ends first.

    Where all ranks begin at once, the heaviest has at most 4/3 of what the best
    assignment would give it.  Ties go to the earlier item and the lower rank.

    Args:
        weights: per item, a finite number of at least 0.
        late_by: per rank, how much later than the first it begins, in the unit of
            the weights; None: all begin at once.

    Raises:
        ValueError: `ranks` is below 1, or there is not one weight per item or not
            one delay per rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks: got {ranks}; use at least 1")
    if len(weights) != len(specs):
        raise ValueError(f"weights: got {len(weights)} for {len(specs)} items")
    if late_by is None:
        late_by = [0.0] * ranks
    if len(late_by) != ranks:
        raise ValueError(f"late_by: got {len(late_by)} for {ranks} ranks")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # (end, items, rank): items without weight spread, too.
    first = [(late, 0, rank) for rank, late in enumerate(late_by)]
    heapq.heapify(first)
    for i in sorted(range(len(specs)), key=lambda i: -weights[i]):
        end, count, rank = first[0]
        shares[rank].append(i)
        heapq.heapreplace(first, (end + weights[i], count + 1, rank))
    return Assignment(
        tuple(tuple(sorted(share)) for share in shares),
        tuple(sum(specs[i].output_tokens for i in share) for share in shares),
    )


@dataclass(frozen=True)
class PathRate:
    """What encoding on one path takes, beside a replay's fixed cost."""

    token_ms: float
    """Per output token, attention between rows not included."""
    attention_ms: float
    """Per unit of ``attention_work``."""


def attention_work(spec: EncoderItemSpec) -> float:
    """Pairs of rows that attend to each other, where rows of an item do so frame
    by frame; 0 where its adapter says nothing of rows (a tile's attention is part
    of its tokens)."""
    rows = spec.demand.get("rows", 0)
    return rows * rows / max(1, spec.demand.get("sequences", 1))


def weigh_items(
    specs: Sequence[EncoderItemSpec], rates: Mapping[str, PathRate] | None
) -> list[float]:
    """What each item adds to the time of the rank that encodes it.

    Args:
        rates: per path, the same on every rank; None: unknown, so an item weighs
            its input size, as in the reference design.
    """
    if rates is None:
        return [float(spec.input_size) for spec in specs]
    return [_weigh(spec, rates) for spec in specs]


def _weigh(spec: EncoderItemSpec, rates: Mapping[str, PathRate]) -> float:
    weight = 0.0
    for path, rate in rates.items():
        tokens = spec.get_path_output_tokens(path)
        if tokens:
            weight += rate.token_ms * tokens
            weight += rate.attention_ms * attention_work(spec)
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
