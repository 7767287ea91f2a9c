# SPDX-License-Identifier: Apache-2.0
"""Makes plans (``plans.py``): which items go together, through which graphs.

Pure functions of integers: the same specs give the same plan everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from vllm_encoder_cg.definitions import (
    AxisKeys,
    EagerReason,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.planning.costs import CostModel, TokenCosts, plan_cost
from vllm_encoder_cg.planning.fitting import GraphTable
from vllm_encoder_cg.planning.packing import Run, pack_cheaply, pack_greedily
from vllm_encoder_cg.planning.plans import PathStep, Plan, SubBatch

_NO_GRAPHS: Mapping[GraphKey, GraphCapacity] = MappingProxyType({})
_REASONS = list(EagerReason)

_KNOWN_PLANS = 512
"""Plans that are kept, of the batches seen last."""

_EMPTY = Plan(())

_Tokens = dict[str, list[int]]
"""Per path, the tokens of each item."""


class Planner:
    """Makes plans for the graphs that exist.

    An item goes by graph on a path if some graph of that path with its axis keys
    holds it alone: its tokens, one item, and every demand that the graph limits.
    Items of a sub-batch that goes by graph have equal axis keys, their demands
    add up, and the smallest graph that holds the sums is replayed, or a larger one
    that was measured to be clearly faster.  Items that no graph holds on any path
    are encoded together, as are items without tokens, which need no step at all.
    Where a path of an item fits and another does not, the other runs eagerly for a
    sub-batch of such items.

    Without a cost model, packing is greedy: smallest first, as long as the sums
    fit, closing a sub-batch early before an item that outweighs it if that lowers
    the budgets enough.  With one, the cheapest of several plans is taken
    (``packing.py``), which may encode more items eagerly; it never costs more than
    the greedy plan or than encoding everything eagerly.
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
        self._greedy = costs is None
        self._costs = TokenCosts() if costs is None else costs
        usable = {k: c for k, c in capacities.items() if k not in dropped}
        self._tables = _make_tables(usable, self._paths, self._costs)
        self._dropped = _make_tables(dropped, self._paths, self._costs)
        self._known: OrderedDict[tuple[int, ...], tuple[object, Plan]] = OrderedDict()

    def plan(self, specs: Sequence[EncoderItemSpec]) -> Plan:
        """A plan for a batch; empty for an empty batch.

        Specs that are the same objects as those of an earlier batch give the plan
        that was made then.
        """
        if not specs:
            return _EMPTY
        name = tuple(map(id, specs))
        known = self._known.get(name)
        if known is not None:
            self._known.move_to_end(name)
        else:
            if len(self._known) >= _KNOWN_PLANS:
                self._known.popitem(last=False)
            # The specs are kept, so that no others get their ids.
            known = self._known[name] = (tuple(specs), self._make(specs))
        return known[1]

    def _make(self, specs: Sequence[EncoderItemSpec]) -> Plan:
        tokens = {
            path: [spec.get_path_output_tokens(path) for spec in specs]
            for path in self._paths
        }
        plan = self._plan_whole(specs, tokens)
        if plan is not None:
            return plan
        groups = self._group(specs, tokens)
        plan = self._plan_parts(specs, tokens, groups)
        if not self._greedy:
            eager = _plan_eager(groups, tokens)
            if plan_cost(eager, self._costs) < plan_cost(plan, self._costs):
                return eager
        return plan

    def _plan_whole(
        self, specs: Sequence[EncoderItemSpec], tokens: _Tokens
    ) -> Plan | None:
        """All items through one graph per path, or all eagerly if that costs
        less; None where another plan might be cheaper, or must be made."""
        if not _alike(specs, tokens):
            return None
        axis_keys = specs[0].axis_keys
        steps = {}
        cost = 0.0
        for path, values in tokens.items():
            total = sum(values)
            if not total:
                continue
            table = self._tables.get((path, axis_keys))
            if table is None:
                return None
            others = [len(specs)]
            for name in table.names:
                others.append(sum([spec.demand.get(name, 0) for spec in specs]))
            position = table.fit(total, others)
            if position < 0 or not (
                len(specs) == 1 or table.best_alone(position, total)
            ):
                return None
            cost += table.costs[position]
            steps[path] = PathStep(table.keys[position], None, total)
        indices = tuple(range(len(specs)))
        if not self._greedy:
            eager = sum(
                self._costs.eager_cost(path, step.tokens)
                for path, step in steps.items()
            )
            if eager < cost:
                pool = dict.fromkeys(indices, EagerReason.CHEAPER_EAGERLY)
                return _finish([], pool, [], tokens)
        return Plan((SubBatch(indices, steps),))

    def _plan_parts(
        self, specs: Sequence[EncoderItemSpec], tokens: _Tokens, groups: _Groups
    ) -> Plan:
        """Packs what fits graphs and gathers what does not."""
        pool = dict(groups.pool)
        sub_batches = []
        for (axis_keys, by_graph), members in groups.runs.items():
            run = Run(
                sorted(members, key=lambda i: specs[i].output_tokens),
                specs,
                tokens,
                {path: self._tables[path, axis_keys] for path in by_graph},
                self._costs,
            )
            if self._greedy:
                ranges = pack_greedily(run)
            else:
                pooled = {p: sum(tokens[p][i] for i in pool) for p in tokens}
                ranges = pack_cheaply(run, pooled)
            taken: set[int] = set()
            for begin, end in ranges:
                taken.update(run.order[begin:end])
                sub_batches.append(_graph_sub_batch(run, begin, end, groups.mixed))
            for i in members:
                if i not in taken:
                    pool[i] = groups.mixed.get(i, EagerReason.CHEAPER_EAGERLY)
        return _finish(sub_batches, pool, groups.nothing, tokens)

    def _group(self, specs: Sequence[EncoderItemSpec], tokens: _Tokens) -> _Groups:
        groups = _Groups()
        if _alike(specs, tokens):
            # If one item as demanding as all of them in every respect fits, each
            # of them does.
            axis_keys = specs[0].axis_keys
            most = {path: max(values) for path, values in tokens.items()}
            by_graph, reason = self._classify(specs, axis_keys, most)
            if reason is None:
                groups.runs[axis_keys, by_graph] = list(range(len(specs)))
                return groups
        for i, spec in enumerate(specs):
            of_item = {path: values[i] for path, values in tokens.items()}
            by_graph, reason = self._classify([spec], spec.axis_keys, of_item)
            if not any(of_item.values()):
                groups.nothing.append(i)
            elif reason is not None and not any(of_item[path] for path in by_graph):
                groups.pool[i] = reason
            else:
                groups.runs.setdefault((spec.axis_keys, by_graph), []).append(i)
                if reason is not None:
                    groups.mixed[i] = reason
        return groups

    def _classify(
        self,
        specs: Sequence[EncoderItemSpec],
        axis_keys: AxisKeys,
        tokens: Mapping[str, int],
    ) -> tuple[tuple[str, ...], EagerReason | None]:
        """For an item with the largest demands of `specs`, the paths with a graph
        that holds it, also where it has nothing there, and why others do not."""
        by_graph = []
        eager = []
        for path, count in tokens.items():
            table = self._tables.get((path, axis_keys))
            if table is not None and _holds(table, specs, count):
                by_graph.append(path)
            elif count:
                dropped = self._dropped.get((path, axis_keys))
                if dropped is not None and _holds(dropped, specs, count):
                    eager.append(EagerReason.DROPPED_GRAPH)
                elif axis_keys and table is None and dropped is None:
                    eager.append(EagerReason.UNCAPTURED_LAYOUT)
                else:
                    eager.append(EagerReason.ABOVE_EVERY_BUDGET)
        return tuple(by_graph), min(eager, key=_REASONS.index, default=None)


@dataclass
class _Groups:
    """The items of a batch by how they can be encoded."""

    runs: dict[tuple[AxisKeys, tuple[str, ...]], list[int]] = field(
        default_factory=dict
    )
    """By axis keys and the paths by graph."""
    mixed: dict[int, EagerReason] = field(default_factory=dict)
    """Why the other paths of some of those are not by graph."""
    pool: dict[int, EagerReason] = field(default_factory=dict)
    """Eager on every path."""
    nothing: list[int] = field(default_factory=list)
    """Without tokens."""


def _alike(specs: Sequence[EncoderItemSpec], tokens: _Tokens) -> bool:
    """Whether all items have equal axis keys, and none is without tokens."""
    axis_keys = specs[0].axis_keys
    return all(map(any, zip(*tokens.values(), strict=True))) and not any(
        spec.axis_keys != axis_keys for spec in specs
    )


def _make_tables(
    graphs: Mapping[GraphKey, GraphCapacity],
    paths: Sequence[str],
    costs: CostModel,
) -> dict[tuple[str, AxisKeys], GraphTable]:
    grouped: dict[tuple[str, AxisKeys], dict[GraphKey, GraphCapacity]] = {}
    for key, capacity in graphs.items():
        if key.path in paths and capacity.tokens > 0:
            grouped.setdefault(key.group, {})[key] = capacity
    return {group: GraphTable(of_group, costs) for group, of_group in grouped.items()}


def _holds(table: GraphTable, specs: Sequence[EncoderItemSpec], tokens: int) -> bool:
    """Whether a graph holds one item of `tokens` with the largest demands of
    `specs`; a demand counts only where there are tokens."""
    if not tokens:
        return True
    others = [1]
    for name in table.names:
        others.append(max([spec.demand.get(name, 0) for spec in specs]))
    return table.fit(tokens, others) >= 0


def _graph_sub_batch(
    run: Run, begin: int, end: int, mixed: Mapping[int, EagerReason]
) -> SubBatch:
    """One range of a run; `mixed` has the reasons of its eager paths."""
    indices = tuple(sorted(run.order[begin:end]))
    reasons = {i: mixed[i] for i in indices if i in mixed}
    positions = iter(run.fit(begin, end) or ())
    steps = {}
    for path, sums in run.tokens.items():
        total = sums[end] - sums[begin]
        if path not in run.tables:
            if total:
                steps[path] = PathStep(None, _first(reasons.values()), total)
            continue
        position = next(positions)
        if position >= 0:
            steps[path] = PathStep(run.tables[path].keys[position], None, total)
    return SubBatch(indices, steps, reasons)


def _plan_eager(groups: _Groups, tokens: _Tokens) -> Plan:
    """Every item on every path."""
    members = [i for run in groups.runs.values() for i in run]
    pool = dict.fromkeys(members, EagerReason.CHEAPER_EAGERLY)
    return _finish([], pool | groups.mixed | groups.pool, groups.nothing, tokens)


def _finish(
    sub_batches: Sequence[SubBatch],
    pool: Mapping[int, EagerReason],
    nothing: Sequence[int],
    tokens: _Tokens,
) -> Plan:
    """`sub_batches`, then the items of `pool` eagerly on every path, then those
    that have nothing to encode."""
    last = []
    if pool:
        reasons = dict(sorted(pool.items()))
        steps = {}
        for path, values in tokens.items():
            total = sum(values[i] for i in reasons)
            if total:
                of_path = [reason for i, reason in reasons.items() if values[i]]
                steps[path] = PathStep(None, _first(of_path), total)
        last.append(SubBatch(tuple(reasons), steps, reasons))
    if nothing:
        last.append(SubBatch(tuple(nothing), {}))
    return Plan((*sub_batches, *last))


def _first(reasons: Iterable[EagerReason]) -> EagerReason:
    """The one to name where items have several."""
    return min(reasons, key=_REASONS.index)
