# SPDX-License-Identifier: Apache-2.0
"""Plans: every item once, nothing beyond a capacity, the reference's packing."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planning import Case, cases, check_plan, graphs, holding, item
from vllm_encoder_cg.definitions import (
    EagerReason,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.planning.planner import Planner
from vllm_encoder_cg.planning.plans import PathStep, Plan, SubBatch

ABOVE = EagerReason.ABOVE_EVERY_BUDGET
DROPPED = EagerReason.DROPPED_GRAPH


def plan_default(
    capacities: dict[GraphKey, GraphCapacity], specs: Sequence[EncoderItemSpec]
) -> Plan:
    return Planner(capacities, ["default"]).plan(specs)


def budgets_of(plan: Plan, path: str = "default") -> list[tuple[tuple[int, ...], int]]:
    """(indices, budget) per sub-batch."""
    return [
        (sub_batch.indices, step.key.token_budget)
        for sub_batch in plan.sub_batches
        if (step := sub_batch.steps[path]).key is not None
    ]


def test_an_empty_batch_has_an_empty_plan() -> None:
    assert plan_default(graphs(64), []) == Plan(())


def test_one_item_takes_the_smallest_graph() -> None:
    plan = plan_default(graphs(128, 64, 256), [item(65)])
    step = PathStep(GraphKey("default", 128), None, 65)
    assert plan == Plan((SubBatch((0,), {"default": step}),))


def test_a_batch_that_fits_stays_in_its_order() -> None:
    plan = plan_default(graphs(64, 256, 1024), [item(300), item(400), item(290)])
    assert budgets_of(plan) == [((0, 1, 2), 1024)]


def test_smallest_items_go_first_until_the_largest_budget_is_full() -> None:
    plan = plan_default(graphs(512, 1024), [item(400), item(500), item(300)])
    assert budgets_of(plan) == [((0, 2), 1024), ((1,), 512)]


def test_equal_items_keep_their_order() -> None:
    plan = plan_default(graphs(100), [item(50)] * 5)
    assert [s.indices for s in plan.sub_batches] == [(0, 1), (2, 3), (4,)]


def test_the_number_of_items_is_limited() -> None:
    plan = plan_default(graphs(1024, items=2), [item(10)] * 5)
    assert [len(s.indices) for s in plan.sub_batches] == [2, 2, 1]


def test_a_sub_batch_closes_early_where_that_saves_a_large_budget() -> None:
    plan = plan_default(graphs(64, 4096, 8192), [item(4096), item(60)])
    assert budgets_of(plan) == [((1,), 64), ((0,), 4096)]


def test_a_sub_batch_does_not_close_early_for_less_than_a_replay() -> None:
    plan = plan_default(graphs(64, 128, 256), [item(128), item(64)])
    assert budgets_of(plan) == [((0, 1), 256)]


@pytest.mark.parametrize("name", ["sequences", "rows", "anything"])
def test_every_named_demand_is_limited(name: str) -> None:
    capacities = graphs(64, **{name: 4}) | graphs(128, **{name: 6})
    fits = plan_default(capacities, [item(10, **{name: 4})])
    assert budgets_of(fits) == [((0,), 64)]
    larger = plan_default(capacities, [item(10, **{name: 5})])
    assert budgets_of(larger) == [((0,), 128)]
    apart = plan_default(capacities, [item(10, **{name: 4}), item(11, **{name: 3})])
    assert budgets_of(apart) == [((0,), 64), ((1,), 64)]
    above = plan_default(capacities, [item(10, **{name: 7})])
    assert above.sub_batches[0].steps["default"].eager is ABOVE


def test_a_demand_that_no_graph_limits_takes_nothing() -> None:
    plan = plan_default(graphs(64, sequences=4), [item(10, windows=10**9)])
    assert budgets_of(plan) == [((0,), 64)]


def test_oversize_items_run_eagerly_together() -> None:
    plan = plan_default(graphs(64), [item(65), item(20), item(1000), item(20)])
    by_graph, eager = plan.sub_batches
    assert by_graph.indices == (1, 3)
    assert by_graph.eager_reasons == {}
    assert eager == SubBatch(
        (0, 2), {"default": PathStep(None, ABOVE, 1065)}, {0: ABOVE, 2: ABOVE}
    )


def test_without_graphs_everything_runs_eagerly() -> None:
    plan = plan_default({}, [item(5), item(6)])
    (sub_batch,) = plan.sub_batches
    assert sub_batch.steps == {"default": PathStep(None, ABOVE, 11)}


def test_a_dropped_graph_is_not_used_and_is_the_reason() -> None:
    planner = Planner(graphs(64, 256), ["default"], dropped=graphs(256, 512))
    plan = planner.plan([item(60), item(200), item(2000)])
    by_graph, eager = plan.sub_batches
    assert by_graph.indices == (0,)
    assert eager.eager_reasons == {1: DROPPED, 2: ABOVE}
    assert eager.steps["default"].eager is ABOVE


def test_a_larger_graph_replaces_a_dropped_one() -> None:
    planner = Planner(graphs(64, 256), ["default"], dropped=graphs(128))
    assert budgets_of(planner.plan([item(100)])) == [((0,), 256)]


def test_axis_keys_are_not_mixed() -> None:
    capacities = {
        GraphKey("default", 100, (width,)): GraphCapacity(100, 8) for width in (70, 140)
    }
    specs = [item(10, (70,)), item(10, (140,)), item(10, (70,)), item(10, (280,))]
    first, second, eager = plan_default(capacities, specs).sub_batches
    assert (first.indices, second.indices, eager.indices) == ((0, 2), (1,), (3,))
    assert first.steps["default"].key == GraphKey("default", 100, (70,))
    assert second.steps["default"].key == GraphKey("default", 100, (140,))
    assert eager.eager_reasons == {3: EagerReason.UNCAPTURED_LAYOUT}


def test_an_item_without_tokens_is_placed_without_steps() -> None:
    plan = plan_default(graphs(64), [item(0), item(10), item(0)])
    assert [(s.indices, len(s.steps)) for s in plan.sub_batches] == [
        ((1,), 1),
        ((0, 2), 0),
    ]


# -- Several paths -------------------------------------------------------------

PATHS = ["global", "local"]


def two_paths(global_: Sequence[int], local: Sequence[int]) -> Planner:
    return Planner(
        graphs(*global_, path="global") | graphs(*local, path="local"), PATHS
    )


def test_each_path_takes_its_own_smallest_graph() -> None:
    planner = two_paths([272, 544], [100, 200, 400])
    (sub_batch,) = planner.plan([item({"global": 272, "local": 300})]).sub_batches
    assert sub_batch.steps == {
        "global": PathStep(GraphKey("global", 272), None, 272),
        "local": PathStep(GraphKey("local", 400), None, 300),
    }


def test_a_path_without_tokens_is_absent() -> None:
    planner = two_paths([544], [100])
    plan = planner.plan([item({"global": 272, "local": 0})] * 2)
    (sub_batch,) = plan.sub_batches
    assert list(sub_batch.steps) == ["global"]


def test_an_absent_path_needs_no_graph() -> None:
    planner = Planner(graphs(544, path="global"), PATHS)
    (sub_batch,) = planner.plan([item({"global": 272, "local": 0})]).sub_batches
    assert sub_batch.steps == {
        "global": PathStep(GraphKey("global", 544), None, 272),
    }


def test_an_item_without_tokens_on_the_eager_path_is_by_graph() -> None:
    planner = Planner(graphs(544, path="global"), PATHS)
    specs = [item({"global": 272, "local": 0}), item({"global": 272, "local": 100})]
    (sub_batch,) = planner.plan(specs).sub_batches
    assert sub_batch.steps["global"].key == GraphKey("global", 544)
    assert sub_batch.steps["local"] == PathStep(None, ABOVE, 100)
    assert sub_batch.eager_reasons == {1: ABOVE}


def test_any_path_that_is_full_ends_a_sub_batch() -> None:
    planner = two_paths([2720], [300])
    plan = planner.plan([item({"global": 272, "local": 200})] * 3)
    assert [s.indices for s in plan.sub_batches] == [(0,), (1,), (2,)]


def test_one_path_by_graph_and_the_other_eagerly() -> None:
    planner = two_paths([272, 544, 1088], [100])
    specs = [
        item({"global": 272, "local": 500}),
        item({"global": 272, "local": 100}),
        item({"global": 272, "local": 600}),
        item({"global": 5000, "local": 600}),
    ]
    partial, whole, eager = planner.plan(specs).sub_batches
    assert partial == SubBatch(
        (0, 2),
        {
            "global": PathStep(GraphKey("global", 544), None, 544),
            "local": PathStep(None, ABOVE, 1100),
        },
        {0: ABOVE, 2: ABOVE},
    )
    assert whole.indices == (1,)
    assert whole.eager_reasons == {}
    assert eager.indices == (3,)
    assert {step.eager for step in eager.steps.values()} == {ABOVE}


# -- Properties ------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(cases())
def test_any_plan_is_sound(case: Case) -> None:
    planner = Planner(case.capacities, case.paths, case.dropped)
    check_plan(case, planner.plan(case.specs))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_without_costs_an_item_is_eager_only_where_nothing_holds_it(
    case: Case,
) -> None:
    plan = Planner(case.capacities, case.paths, case.dropped).plan(case.specs)
    for sub_batch in plan.sub_batches:
        for path, step in sub_batch.steps.items():
            if step.key is None:
                assert step.eager in (ABOVE, DROPPED, EagerReason.UNCAPTURED_LAYOUT)
                for i in sub_batch.indices:
                    spec = case.specs[i]
                    if spec.get_path_output_tokens(path):
                        assert not holding(case.capacities, path, [spec])


@settings(max_examples=100, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_plans_depend_on_the_specs_alone(case: Case, random: object) -> None:
    plan = Planner(case.capacities, case.paths, case.dropped).plan(case.specs)
    shuffled = list(case.capacities.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = Planner(dict(shuffled), case.paths, case.dropped)
    assert again.plan(copy.deepcopy(case.specs)) == plan
    assert again.plan(case.specs) == plan


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_sub_batches_of_one_path_are_consecutive_by_size(sizes: list[int]) -> None:
    plan = plan_default(graphs(100, 200, 400, items=8), [item(s) for s in sizes])
    packed = [sorted(sizes[i] for i in s.indices) for s in plan.sub_batches]
    assert [size for sub_batch in packed for size in sub_batch] == sorted(sizes)


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; from vllm_encoder_cg.planning import budgets, planner;"
        "print(*sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == []


def test_specs_seen_before_are_planned_once() -> None:
    planner = Planner(graphs(64, 128), ["default"])
    large, small = item(60), item(4)
    first = planner.plan([large, small])
    assert planner.plan([large, small]) is first
    assert planner.plan([small, large]) is not first
    for size in range(1, 600):  # more than are kept
        (sub_batch,) = planner.plan([item(size % 64 + 1)]).sub_batches
        assert sub_batch.steps["default"].tokens == size % 64 + 1
    assert planner.plan([large, small]) == first
