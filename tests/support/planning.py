# SPDX-License-Identifier: Apache-2.0
"""Strategies and checks for plans, shared by the tests of planner and costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from vllm_encoder_cg.definitions import (
    EagerReason,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.planning.costs import CostModel
from vllm_encoder_cg.planning.planner import Plan

NAMES = ("sequences", "rows")


def item(
    tokens: int | Mapping[str, int], axis_keys: tuple[int, ...] = (), **demand: int
) -> EncoderItemSpec:
    """An item of the default path, or of the paths named."""
    if isinstance(tokens, int):
        return EncoderItemSpec(4 * tokens, tokens, {}, demand, axis_keys)
    total = sum(tokens.values())
    return EncoderItemSpec(4 * total, total, dict(tokens), demand, axis_keys)


def graphs(
    *budgets: int, items: int = 64, path: str = "default", **extra: int
) -> dict[GraphKey, GraphCapacity]:
    """Graphs of one path that hold exactly their budgets."""
    return {GraphKey(path, b): GraphCapacity(b, items, extra) for b in budgets}


@dataclass
class Case:
    """A batch and the graphs for it."""

    paths: tuple[str, ...]
    capacities: dict[GraphKey, GraphCapacity]
    dropped: dict[GraphKey, GraphCapacity]
    specs: list[EncoderItemSpec]


_AXES: list[tuple[int, ...]] = [(), (1,), (2,)]


@st.composite
def cases(draw: st.DrawFn, max_items: int = 12) -> Case:
    """Batches and graphs with every feature, small enough to collide often."""
    paths = draw(st.sampled_from([("default",), ("global", "local")]))
    axes = draw(st.sampled_from([_AXES[:1], _AXES[1:]]))
    names = draw(st.sampled_from([(), NAMES[:1], NAMES]))
    capacities = {}
    dropped = {}
    for path in paths:
        for axis in axes:
            for budget in draw(st.sets(st.integers(1, 60), max_size=5)):
                capacity = GraphCapacity(
                    budget + draw(st.integers(0, 3)),
                    draw(st.integers(1, 8)),
                    {
                        name: draw(st.integers(1, 40))
                        for name in names
                        if draw(st.booleans())
                    },
                )
                target = dropped if draw(st.integers(0, 9)) == 0 else capacities
                target[GraphKey(path, budget, axis)] = capacity
    specs = []
    for _ in range(draw(st.integers(0, max_items))):
        tokens: int | dict[str, int] = {
            path: draw(st.integers(0, 40)) for path in paths
        }
        if paths == ("default",):
            tokens = draw(st.integers(0, 50))
        demand = {name: draw(st.integers(0, 12)) for name in names}
        specs.append(item(tokens, draw(st.sampled_from(axes)), **demand))
    return Case(paths, capacities, dropped, specs)


def holds(
    capacity: GraphCapacity, path: str, specs: Collection[EncoderItemSpec]
) -> bool:
    """Whether one replay holds `specs`, by the definition of a capacity."""
    return (
        sum(s.get_path_output_tokens(path) for s in specs) <= capacity.tokens
        and len(specs) <= capacity.items
        and all(
            sum(s.demand.get(name, 0) for s in specs) <= limit
            for name, limit in capacity.extra.items()
        )
    )


def holding(
    graphs_: Mapping[GraphKey, GraphCapacity],
    path: str,
    specs: Sequence[EncoderItemSpec],
) -> list[GraphKey]:
    """The graphs that hold `specs`, smallest first."""
    found = [
        (capacity.tokens, key.token_budget, key)
        for key, capacity in graphs_.items()
        if key.path == path
        and all(key.axis_keys == s.axis_keys for s in specs)
        and holds(capacity, path, specs)
    ]
    return [key for _, _, key in sorted(found, key=lambda entry: entry[:2])]


def check_plan(case: Case, plan: Plan, costs: CostModel | None = None) -> None:
    """Everything that holds for any plan, whoever made it.

    Args:
        costs: what it was made by.
    """
    placed = [i for sub_batch in plan.sub_batches for i in sub_batch.indices]
    assert sorted(placed) == list(range(len(case.specs)))
    wholly_eager = 0
    for sub_batch in plan.sub_batches:
        assert sub_batch.indices
        assert list(sub_batch.indices) == sorted(sub_batch.indices)
        specs = [case.specs[i] for i in sub_batch.indices]
        for path in case.paths:
            tokens = sum(s.get_path_output_tokens(path) for s in specs)
            step = sub_batch.steps.get(path)
            assert (step is None) == (tokens == 0)
            if step is None:
                continue
            assert step.tokens == tokens
            assert (step.key is None) != (step.eager is None)
            if step.key is not None:
                smallest, *others = holding(case.capacities, path, specs)
                if step.key != smallest:
                    assert step.key in others and costs is not None
                    assert costs.replay_cost(step.key) < costs.replay_cost(smallest)
        steps = sub_batch.steps.values()
        eager = [step for step in steps if step.key is None]
        wholly_eager += bool(eager) and len(eager) == len(steps)
        assert set(sub_batch.eager_reasons) == {
            i
            for i in sub_batch.indices
            for path, step in sub_batch.steps.items()
            if step.key is None and case.specs[i].get_path_output_tokens(path)
        }
        for step in eager:
            assert step.eager in sub_batch.eager_reasons.values()
        for i, reason in sub_batch.eager_reasons.items():
            _check_reason(case, case.specs[i], reason)
    assert wholly_eager <= 1


def _check_reason(case: Case, spec: EncoderItemSpec, reason: EagerReason) -> None:
    """A reason is true of the item."""
    paths = [path for path in case.paths if spec.get_path_output_tokens(path)]
    without = [path for path in paths if not holding(case.capacities, path, [spec])]
    by_dropped = [path for path in without if holding(case.dropped, path, [spec])]
    if reason is EagerReason.CHEAPER_EAGERLY:
        assert not without
    elif reason is EagerReason.DROPPED_GRAPH:
        assert without
        assert by_dropped == without
    elif reason is EagerReason.UNCAPTURED_LAYOUT:
        known = {(key.path, key.axis_keys) for key in case.capacities | case.dropped}
        assert spec.axis_keys
        assert any((path, spec.axis_keys) not in known for path in without)
    else:
        assert reason is EagerReason.ABOVE_EVERY_BUDGET
        assert set(without) - set(by_dropped)
