# SPDX-License-Identifier: Apache-2.0
"""What plans cost, and that the cheaper one is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.planning import Case, cases, check_plan, graphs, item
from vllm_encoder_cg.definitions import EagerReason, GraphCapacity, GraphKey
from vllm_encoder_cg.planning.budgets import fine_levels, power_of_two_levels
from vllm_encoder_cg.planning.costs import (
    CostModel,
    MeasuredCosts,
    TokenCosts,
    plan_cost,
)
from vllm_encoder_cg.planning.planner import Plan, Planner

CHEAPER = EagerReason.CHEAPER_EAGERLY
ABOVE = EagerReason.ABOVE_EVERY_BUDGET


@dataclass
class LinearCosts:
    """A fixed cost per step and one per token computed."""

    per_replay: float = 2.0
    per_eager: float = 14.0
    per_token: float = 0.5
    """Of a replay's budget."""
    per_eager_token: float = 0.5

    def replay_cost(self, key: GraphKey) -> float:
        return self.per_replay + self.per_token * key.token_budget

    def eager_cost(self, path: str, tokens: int) -> float:
        return self.per_eager + self.per_eager_token * tokens


cost_models = st.one_of(
    st.builds(
        TokenCosts,
        per_replay=st.integers(0, 30),
        eager_floor=st.integers(0, 60),
        per_eager=st.integers(0, 60),
    ),
    st.builds(
        LinearCosts,
        per_replay=st.floats(0, 30),
        per_eager=st.floats(0, 60),
        per_token=st.floats(0, 2),
        per_eager_token=st.floats(0, 2),
    ),
    st.builds(
        MeasuredCosts,
        st.dictionaries(
            st.builds(GraphKey, st.just("local"), st.integers(1, 60)),
            st.floats(0.1, 60),
        ),
        st.dictionaries(
            st.sampled_from(["default", "global"]),
            st.dictionaries(st.integers(1, 200), st.floats(0.1, 200), max_size=4),
        ),
    ),
)


def sizes_by_budget(plan: Plan) -> list[tuple[tuple[int, ...], int | EagerReason]]:
    return [
        (s.indices, step.key.token_budget if step.key else step.eager)  # type: ignore[misc]
        for s in plan.sub_batches
        for step in s.steps.values()
    ]


def plan_priced(
    budgets: tuple[int, ...], sizes: list[int], costs: CostModel
) -> list[tuple[tuple[int, ...], int | EagerReason]]:
    planner = Planner(graphs(*budgets), ["default"], costs=costs)
    return sizes_by_budget(planner.plan([item(size) for size in sizes]))


# -- Prices --------------------------------------------------------------------


def test_token_costs() -> None:
    costs = TokenCosts(per_replay=10, eager_floor=100, per_eager=20)
    assert costs.replay_cost(GraphKey("default", 64)) == 74
    assert costs.eager_cost("default", 64) == 120
    assert costs.eager_cost("default", 640) == 660


def test_a_plan_costs_what_its_steps_cost() -> None:
    costs = LinearCosts()
    planner = Planner(graphs(64), ["default"])
    plan = planner.plan([item(60), item(50), item(100), item(200), item(0)])
    assert plan_cost(plan, costs) == 2 * (2 + 32) + 14 + 150
    assert plan_cost(Plan(()), costs) == 0


def test_measured_replays_are_looked_up_and_interpolated() -> None:
    costs = MeasuredCosts(
        {
            GraphKey("default", 64): 2.0,
            GraphKey("default", 128): 3.0,
            GraphKey("default", 64, (1,)): 7.0,
        },
        {},
    )
    assert costs.replay_cost(GraphKey("default", 64)) == 2.0
    assert costs.replay_cost(GraphKey("default", 96)) == 2.5
    assert costs.replay_cost(GraphKey("default", 32)) == 2.0
    assert costs.replay_cost(GraphKey("default", 256)) == 5.0
    assert costs.replay_cost(GraphKey("default", 64, (1,))) == 7.0
    assert costs.replay_cost(GraphKey("default", 64, (2,))) == 3.0
    assert costs.replay_cost(GraphKey("other", 64)) == 0.0


def test_measured_eager_times_are_interpolated() -> None:
    costs = MeasuredCosts({}, {"default": {1000: 14.0, 2000: 24.0}, "one": {100: 5.0}})
    assert costs.eager_cost("default", 10) == 14.0
    assert costs.eager_cost("default", 1500) == 19.0
    assert costs.eager_cost("default", 3000) == 34.0
    assert costs.eager_cost("one", 50) == 5.0
    assert costs.eager_cost("one", 200) == 10.0
    assert 1e6 < costs.eager_cost("other", 1) < math.inf


def test_eager_times_that_fall_with_more_tokens_are_noise() -> None:
    replays = {64: 9.0, 128: 3.0, 256: 4.0}
    costs = MeasuredCosts(
        {GraphKey("default", budget): ms for budget, ms in replays.items()},
        {"default": replays},
    )
    for budget, expected in ((64, 3.0), (128, 3.0), (256, 4.0)):
        assert costs.eager_cost("default", budget) == expected
        assert costs.replay_cost(GraphKey("default", budget)) == replays[budget]


def test_what_is_not_measured_costs_no_less_than_the_largest_that_was() -> None:
    costs = MeasuredCosts(
        {GraphKey("default", budget): ms for budget, ms in ((64, 9.0), (128, 3.0))}, {}
    )
    assert costs.replay_cost(GraphKey("default", 512)) == 3.0


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_named(ms: float) -> None:
    with pytest.raises(ValueError, match=r"path 'default', budget 64: got"):
        MeasuredCosts({GraphKey("default", 64): ms}, {})
    with pytest.raises(ValueError, match=r"eager, path 'p', 64 tokens: got"):
        MeasuredCosts({}, {"p": {64: ms}})


@given(
    st.dictionaries(st.integers(1, 10_000), st.floats(0.001, 1000), min_size=1),
    st.lists(st.integers(1, 20_000), min_size=2, max_size=2).map(sorted),
)
def test_measured_times_never_fall(times: dict[int, float], at: list[int]) -> None:
    costs = MeasuredCosts({}, {"default": times})
    few, many = (costs.eager_cost("default", tokens) for tokens in at)
    assert 0 < few <= many * (1 + 1e-9)


# -- Plans ---------------------------------------------------------------------


def test_a_graph_that_costs_more_than_eager_is_not_replayed() -> None:
    costs = LinearCosts()
    assert plan_priced((4096,), [65], costs) == [((0,), CHEAPER)]
    assert plan_priced((64, 4096), [64], costs) == [((0,), 64)]


def test_a_batch_that_pads_too_much_runs_eagerly_as_a_whole() -> None:
    # 5 images of 640x480: 1500 tokens in a graph of 2048 took longer than eager.
    costs = MeasuredCosts(
        {GraphKey("default", 512): 7.0, GraphKey("default", 2048): 20.8},
        {"default": {256: 14.5, 1500: 16.1, 2048: 22.0}},
    )
    assert plan_priced((512, 2048), [300] * 5, costs) == [((0, 1, 2, 3, 4), CHEAPER)]
    assert plan_priced((512, 2048), [300], costs) == [((0,), 512)]


def test_two_replays_that_cost_less_than_one() -> None:
    costs = LinearCosts(per_eager=10_000)
    assert plan_priced((64, 4096, 8192), [60, 4096], costs) == [
        ((0,), 64),
        ((1,), 4096),
    ]
    assert plan_priced((64, 128), [60, 60], LinearCosts()) == [((0, 1), 128)]


def test_the_best_cut_is_found_where_greedy_packing_misses_it() -> None:
    costs = LinearCosts(per_eager=10_000)
    sizes = [300, 300, 300, 300]
    greedy = Planner(graphs(600, 1000), ["default"]).plan([item(s) for s in sizes])
    assert sizes_by_budget(greedy) == [((0, 1, 2), 1000), ((3,), 600)]
    assert plan_priced((600, 1000), sizes, costs) == [((0, 1), 600), ((2, 3), 600)]


def test_items_join_an_eager_forward_that_runs_anyway() -> None:
    costs = LinearCosts(per_replay=2, per_eager=100, per_eager_token=0.6)
    planner = Planner(graphs(64, 1024), ["default"], costs=costs)
    plan = planner.plan([item(60), item(600), item(3000)])
    first, pool = plan.sub_batches
    assert first.indices == (0,)
    assert pool.indices == (1, 2)
    assert pool.eager_reasons == {1: CHEAPER, 2: ABOVE}
    assert pool.steps["default"].eager is ABOVE
    assert pool.steps["default"].tokens == 3600
    without = planner.plan([item(60), item(800)])
    assert without.sub_batches[-1].steps["default"].key is not None


def test_a_badly_padded_item_before_a_fitting_one_runs_eagerly() -> None:
    costs = LinearCosts(per_replay=1, per_eager=10, per_token=1, per_eager_token=3)
    assert plan_priced((64, 8192), [1000, 8192], costs) == [
        ((1,), 8192),
        ((0,), CHEAPER),
    ]


def test_unmeasured_eager_times_do_not_speak_against_graphs() -> None:
    costs = MeasuredCosts({GraphKey("default", b): b / 10 for b in (64, 512)}, {})
    assert plan_priced((64, 512), [500, 64, 600, 400], costs) == [
        ((1, 3), 512),
        ((0,), 512),
        ((2,), ABOVE),
    ]


def test_equal_costs_prefer_fewer_sub_batches_then_graphs() -> None:
    costs = LinearCosts(per_replay=0, per_eager=10_000, per_token=1)
    assert plan_priced((64, 128), [64, 64], costs) == [((0, 1), 128)]
    assert plan_priced((64,), [64], LinearCosts(0, 0, 1, 1)) == [((0,), 64)]


def test_paths_are_priced_together() -> None:
    capacities = graphs(300, 4000, path="global") | graphs(100, 4000, path="local")
    costs = LinearCosts(1, per_eager=100, per_token=1, per_eager_token=1)
    planner = Planner(capacities, ["global", "local"], costs=costs)
    spec = item({"global": 290, "local": 90})
    together = planner.plan([spec, spec])
    assert [s.indices for s in together.sub_batches] == [(0,), (1,)]
    alone = planner.plan([item({"global": 290, "local": 200})])
    assert alone.sub_batches[0].eager_reasons == {0: CHEAPER}


def test_a_larger_graph_that_is_faster_is_replayed() -> None:
    costs = MeasuredCosts(
        {GraphKey("default", 64): 4.0, GraphKey("default", 80): 3.0}, {}
    )
    assert plan_priced((64, 80), [60], costs) == [((0,), 80)]
    nearly = MeasuredCosts(
        {GraphKey("default", 64): 4.0, GraphKey("default", 80): 3.95}, {}
    )
    assert plan_priced((64, 80), [60], nearly) == [((0,), 64)]


def test_a_faster_graph_stands_only_for_one_that_holds_no_more() -> None:
    small, large = GraphKey("default", 64), GraphKey("default", 80)
    costs = MeasuredCosts({small: 4.0, large: 3.0}, {})
    capacities = {small: GraphCapacity(64, 8), large: GraphCapacity(80, 2)}
    planner = Planner(capacities, ["default"], costs=costs)
    for count, key in ((2, small), (3, small)):
        (sub_batch,) = planner.plan([item(8)] * count).sub_batches
        assert sub_batch.steps["default"].key == key


@pytest.mark.parametrize("ladder", [fine_levels, power_of_two_levels])
def test_a_guess_keeps_what_launches_dominate_on_graphs(ladder: object) -> None:
    levels = ladder(64, 16384)  # type: ignore[operator]
    for size in range(1, 1024, 31):
        ((_, chosen),) = plan_priced(levels, [size], TokenCosts())
        assert chosen == next(level for level in levels if level >= size)


@settings(max_examples=300, deadline=None)
@given(cases(), cost_models)
def test_a_priced_plan_is_sound(case: Case, costs: CostModel) -> None:
    planner = Planner(case.capacities, case.paths, case.dropped, costs)
    plan = planner.plan(case.specs)
    check_plan(case, plan, costs)
    assert planner.plan(case.specs) == plan


@settings(max_examples=150, deadline=None)
@given(cases(max_items=40), cost_models)
def test_a_priced_plan_costs_no_more_than_others(case: Case, costs: CostModel) -> None:
    priced = Planner(case.capacities, case.paths, case.dropped, costs)
    found = plan_cost(priced.plan(case.specs), costs)
    greedy = Planner(case.capacities, case.paths, case.dropped)
    eager = Planner({}, case.paths)
    for other in (greedy, eager):
        assert found <= plan_cost(other.plan(case.specs), costs) * (1 + 1e-9) + 1e-9


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 600), min_size=65, max_size=130),
    st.sets(st.integers(600, 16384), min_size=1, max_size=8),
    cost_models,
)
def test_large_batches_cost_no_more_than_greedy_ones(
    sizes: list[int], budgets: set[int], costs: CostModel
) -> None:
    specs = [item(size) for size in sizes]
    priced = Planner(graphs(*budgets), ["default"], costs=costs).plan(specs)
    greedy = Planner(graphs(*budgets), ["default"]).plan(specs)
    assert plan_cost(priced, costs) <= plan_cost(greedy, costs) * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(1, 60), min_size=1, max_size=5),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.integers(0, 20),
)
@example({1, 2, 4, 8}, [1, 2, 1, 4], 0)
def test_no_consecutive_cuts_cost_less(
    budgets: set[int], sizes: list[int], per_replay: int
) -> None:
    """Against every way to cut the sorted items, where eager is no choice."""
    costs = LinearCosts(per_replay, per_eager=10**6, per_token=1)
    fitting = sorted(size for size in sizes if size <= max(budgets))

    def cheapest(rest: list[int]) -> float:
        if not rest:
            return 0.0
        found = math.inf
        for count in range(1, len(rest) + 1):
            holding = [b for b in budgets if b >= sum(rest[:count])]
            if holding:
                replay = per_replay + min(holding)
                found = min(found, replay + cheapest(rest[count:]))
        return found

    planner = Planner(graphs(*budgets), ["default"], costs=costs)
    plan = planner.plan([item(size) for size in fitting])
    assert plan_cost(plan, costs) == cheapest(fitting)
