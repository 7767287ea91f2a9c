# SPDX-License-Identifier: Apache-2.0
"""Plans: which items go together, through which graphs.

Pure functions of integers: the same specs give the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from vllm_encoder_cg.costs import CostModel
from vllm_encoder_cg.definitions import (
    AxisKeys,
    EagerReason,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.fitting import GraphTable
from vllm_encoder_cg.packing import Run, pack_cheaply, pack_greedily

_NO_GRAPHS: Mapping[GraphKey, GraphCapacity] = MappingProxyType({})
_NO_REASONS: Mapping[int, EagerReason] = MappingProxyType({})
_REASONS = list(EagerReason)


@dataclass(frozen=True, slots=True)
class PathStep:
    """How one path of a sub-batch is encoded: by a graph or eagerly."""

    key: GraphKey | None
    """The graph to replay; None: eager."""
    eager: EagerReason | None
    """Why without a graph; None: by graph."""
    tokens: int
    """Output tokens of the items, padding not included."""


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Items that are encoded together."""

    indices: tuple[int, ...]
    """Positions in the batch, ascending."""
    steps: Mapping[str, PathStep]
    """Per path; a path on which the items have nothing is absent."""
    eager_reasons: Mapping[int, EagerReason] = field(
        default_factory=lambda: _NO_REASONS
    )
    """Per index, why a path of that item runs eagerly; empty where every step
    is a graph."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every item of a batch in exactly one sub-batch."""

    sub_batches: tuple[SubBatch, ...]


_EMPTY = Plan(())


class Planner:
    """Makes plans for the graphs that exist.

    An item goes by graph on a path if some graph of that path with its axis keys
    holds it alone: its tokens, one item, and every demand that the graph limits.
    Items of a sub-batch that goes by graph have equal axis keys, their demands
    add up, and the smallest graph that holds the sums is replayed.  Items that
    no graph holds on any path are encoded together, as are items without tokens,
    which need no step at all.  Where a path of an item fits and another does not,
    the other runs eagerly for a sub-batch of such items.

    Without a cost model, packing is greedy: smallest first, as long as the sums
    fit, and closing a sub-batch early before an item that outweighs it if that
    lowers the summed budgets.  With one, the cheapest of several plans is taken
    (``packing.py``), which may encode more items eagerly; it never costs more
    than the greedy plan.  If one sub-batch takes the whole batch, its items are
    in the order of the batch.
    """

    def __init__(
        self,
        capacities: Mapping[GraphKey, GraphCapacity],
        paths: Sequence[str],
        dropped: Mapping[GraphKey, GraphCapacity] = _NO_GRAPHS,
        costs: CostModel | None = None,
    ) -> None:
        """
        Args:
            capacities: the graphs.
            paths: the model's paths; a graph of any other is not used.
            dropped: what graphs that may not be used would have held.
            costs: None: greedy packing.
        """
        self._paths = tuple(paths)
        self._costs = costs
        usable = {k: c for k, c in capacities.items() if k not in dropped}
        self._tables = _make_tables(usable, self._paths, costs)
        self._dropped = _make_tables(dropped, self._paths, None)

    def plan(self, specs: Sequence[EncoderItemSpec]) -> Plan:
        """A plan for a batch; empty for an empty batch."""
        if not specs:
            return _EMPTY
        tokens = {
            path: [spec.get_path_output_tokens(path) for spec in specs]
            for path in self._paths
        }
        return self._plan_whole(specs, tokens) or self._plan_parts(specs, tokens)

    def _plan_whole(
        self, specs: Sequence[EncoderItemSpec], tokens: dict[str, list[int]]
    ) -> Plan | None:
        """All items through one graph per path, or all eagerly if that costs
        less; None where another plan might be cheaper, or must be made."""
        axis_keys = specs[0].axis_keys
        if any(spec.axis_keys != axis_keys for spec in specs):
            return None
        if not all(map(any, zip(*tokens.values(), strict=True))):
            return None
        steps = {}
        cost = 0.0
        for path, values in tokens.items():
            total = sum(values)
            if not total:
                continue
            table = self._tables.get((path, axis_keys))
            if table is None:
                return None
            extra = [
                sum([spec.demand.get(name, 0) for spec in specs])
                for name in table.names
            ]
            position = table.fit(total, len(specs), extra)
            if position < 0 or not (
                len(specs) == 1 or table.best_alone(position, total)
            ):
                return None
            cost += table.costs[position]
            steps[path] = PathStep(table.keys[position], None, total)
        indices = tuple(range(len(specs)))
        if self._costs is not None:
            eager = sum(
                self._costs.eager_cost(path, step.tokens)
                for path, step in steps.items()
            )
            if eager < cost:
                reasons = dict.fromkeys(indices, EagerReason.CHEAPER_EAGERLY)
                return Plan((_eager_sub_batch(reasons, tokens),))
        return Plan((SubBatch(indices, steps),))

    def _plan_parts(
        self, specs: Sequence[EncoderItemSpec], tokens: dict[str, list[int]]
    ) -> Plan:
        """Packs what fits graphs and gathers what does not."""
        nothing: list[int] = []
        pool: dict[int, EagerReason] = {}
        mixed: dict[int, EagerReason] = {}
        runs: dict[tuple[AxisKeys, tuple[str, ...]], list[int]] = {}
        for i, spec in enumerate(specs):
            by_graph, reason = self._classify(spec, {p: tokens[p][i] for p in tokens})
            if by_graph:
                runs.setdefault((spec.axis_keys, by_graph), []).append(i)
                if reason is not None:
                    mixed[i] = reason
            elif reason is not None:
                pool[i] = reason
            else:
                nothing.append(i)

        sub_batches = []
        for (axis_keys, by_graph), members in runs.items():
            run = Run(
                sorted(members, key=lambda i: specs[i].output_tokens),
                specs,
                tokens,
                {path: self._tables[path, axis_keys] for path in by_graph},
            )
            if self._costs is None:
                ranges = pack_greedily(run)
            else:
                pooled = {p: sum(tokens[p][i] for i in pool) for p in tokens}
                ranges = pack_cheaply(run, self._costs, pooled)
            taken: set[int] = set()
            for begin, end in ranges:
                taken.update(run.order[begin:end])
                sub_batches.append(_graph_sub_batch(run, begin, end, mixed))
            for i in members:
                if i not in taken:
                    pool[i] = mixed.get(i, EagerReason.CHEAPER_EAGERLY)
        if pool:
            sub_batches.append(_eager_sub_batch(dict(sorted(pool.items())), tokens))
        if nothing:
            sub_batches.append(SubBatch(tuple(nothing), {}))
        return Plan(tuple(sub_batches))

    def _classify(
        self, spec: EncoderItemSpec, tokens: Mapping[str, int]
    ) -> tuple[tuple[str, ...], EagerReason | None]:
        """The paths on which a graph holds an item, also where it has nothing
        there, and why the others do not.  No paths and no reason: no tokens."""
        by_graph = []
        eager = []
        for path, count in tokens.items():
            key = (path, spec.axis_keys)
            if not count or _holds(self._tables.get(key), spec, count):
                by_graph.append(path)
            elif _holds(self._dropped.get(key), spec, count):
                eager.append(EagerReason.DROPPED_GRAPH)
            else:
                eager.append(EagerReason.ABOVE_EVERY_BUDGET)
        if not any(tokens[path] for path in by_graph):
            by_graph = []
        return tuple(by_graph), min(eager, key=_REASONS.index, default=None)


def _make_tables(
    graphs: Mapping[GraphKey, GraphCapacity],
    paths: Sequence[str],
    costs: CostModel | None,
) -> dict[tuple[str, AxisKeys], GraphTable]:
    grouped: dict[tuple[str, AxisKeys], dict[GraphKey, GraphCapacity]] = {}
    for key, capacity in graphs.items():
        if key.path in paths:
            grouped.setdefault((key.path, key.axis_keys), {})[key] = capacity
    return {name: GraphTable(group, costs) for name, group in grouped.items()}


def _holds(table: GraphTable | None, spec: EncoderItemSpec, tokens: int) -> bool:
    if table is None:
        return False
    return table.fit(tokens, 1, [spec.demand.get(n, 0) for n in table.names]) >= 0


def _graph_sub_batch(
    run: Run, begin: int, end: int, mixed: Mapping[int, EagerReason]
) -> SubBatch:
    """One range of a run; `mixed` has the reasons of its eager paths."""
    indices = tuple(sorted(run.order[begin:end]))
    reasons = {i: mixed[i] for i in indices if i in mixed}
    picks = iter(run.fit(begin, end) or ())
    steps = {}
    for path, sums in run.tokens.items():
        total = sums[end] - sums[begin]
        if path not in run.tables:
            steps[path] = PathStep(None, _first(reasons.values()), total)
            continue
        pick = next(picks)
        if pick >= 0:
            steps[path] = PathStep(run.tables[path].keys[pick], None, total)
    return SubBatch(indices, steps, reasons)


def _eager_sub_batch(
    reasons: Mapping[int, EagerReason], tokens: Mapping[str, Sequence[int]]
) -> SubBatch:
    """Items that run eagerly on every path, in the order of `reasons`."""
    steps = {}
    for path, values in tokens.items():
        total = sum(values[i] for i in reasons)
        if total:
            of_path = [reason for i, reason in reasons.items() if values[i]]
            steps[path] = PathStep(None, _first(of_path), total)
    return SubBatch(tuple(reasons), steps, reasons)


def _first(reasons: Iterable[EagerReason]) -> EagerReason:
    """The one to name where items have several."""
    return min(reasons, key=_REASONS.index)
