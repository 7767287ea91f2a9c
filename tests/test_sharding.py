# SPDX-License-Identifier: Apache-2.0
"""Which rank encodes which items: a partition, balanced, the same everywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planning import Case, cases, check_plan, graphs, item
from vllm_encoder_cg.costs import MeasuredCosts
from vllm_encoder_cg.definitions import EncoderItemSpec, GraphKey
from vllm_encoder_cg.planner import Plan, Planner
from vllm_encoder_cg.sharding import Assignment, ItemWeights, assign_items, place

specs_of = st.lists(st.integers(0, 500).map(item), max_size=20)


def assign(*tokens: int, ranks: int = 2) -> Assignment:
    """Items of so many tokens, balanced by input size."""
    specs = [item(count) for count in tokens]
    return assign_items(specs, ranks, ItemWeights([], None)(specs))


@settings(deadline=None)
@given(specs_of, st.integers(1, 9))
def test_every_item_on_one_rank(specs: list[EncoderItemSpec], ranks: int) -> None:
    assignment = assign_items(specs, ranks, ItemWeights([], None)(specs))
    assert len(assignment.items) == len(assignment.tokens) == ranks
    assert sorted(assignment.order) == list(range(len(specs)))
    for items, tokens in zip(assignment.items, assignment.tokens, strict=True):
        assert list(items) == sorted(items)
        assert tokens == sum(specs[i].output_tokens for i in items)


@settings(deadline=None)
@given(specs_of, st.integers(1, 9))
def test_equal_specs_give_equal_assignments(
    specs: list[EncoderItemSpec], ranks: int
) -> None:
    weights = ItemWeights([], None)(specs)
    again = [item(spec.output_tokens) for spec in specs]
    assert assign_items(specs, ranks, weights) == assign_items(again, ranks, weights)


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_within_a_third_of_the_best(weights: list[int], ranks: int) -> None:
    assignment = assign_items([item(w) for w in weights], ranks, weights)

    def heaviest(of_item: tuple[int, ...]) -> int:
        return max(
            sum(w for w, rank in zip(weights, of_item, strict=True) if rank == r)
            for r in range(ranks)
        )

    best = min(map(heaviest, itertools.product(range(ranks), repeat=len(weights))))
    assert max(assignment.tokens) <= best * 4 / 3


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(1, 5))
def test_equal_items_differ_by_at_most_one(count: int, ranks: int) -> None:
    assignment = assign(*[7] * count, ranks=ranks)
    sizes = [len(items) for items in assignment.items]
    assert max(sizes) - min(sizes) <= 1


def test_one_huge_item_has_a_rank_to_itself() -> None:
    assert assign(10, 10, 4000, 10, 10).items == ((2,), (0, 1, 3, 4))


def test_more_ranks_than_items() -> None:
    assignment = assign(5, 9, ranks=4)
    assert assignment.items == ((1,), (0,), (), ())
    assert assignment.tokens == (9, 5, 0, 0)


def test_no_items() -> None:
    assert assign(ranks=3) == Assignment(((), (), ()), (0, 0, 0))


def test_items_without_weight_spread() -> None:
    assert [len(items) for items in assign(0, 0, 0, 0, ranks=4).items] == [1] * 4


def test_one_rank_takes_all() -> None:
    assert assign(3, 1, 2, ranks=1).items == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("ranks", "weights", "message"),
    [(0, [1.0], "ranks: got 0"), (2, [1.0, 1.0], "weights: got 2 for 1 items")],
)
def test_bad_arguments(ranks: int, weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_items([item(1)], ranks, weights)


class TestItemWeights:
    """Of what the ranks know alike."""

    keys = (*graphs(64, 256), *graphs(64, 128, path="local"))

    def test_without_costs_the_input_size(self) -> None:
        spec = EncoderItemSpec(input_size=123, output_tokens=7)
        assert ItemWeights(self.keys, None)([spec]) == [123.0]

    def test_share_of_the_largest_graph(self) -> None:
        replay_ms = {GraphKey("default", 64): 2.0, GraphKey("default", 256): 6.0}
        costs = MeasuredCosts(replay_ms, {"default": {64: 50.0}})
        assert ItemWeights(replay_ms, costs)([item(128), item(32)]) == [3.0, 0.75]

    def test_above_every_budget_an_eager_forward(self) -> None:
        replay_ms = {GraphKey("default", 64): 2.0}
        costs = MeasuredCosts(replay_ms, {"default": {64: 5.0, 128: 7.0}})
        assert ItemWeights(replay_ms, costs)([item(128)]) == [7.0]

    def test_paths_add_up_at_their_own_rates(self) -> None:
        replay_ms = {GraphKey("global", 64): 2.0, GraphKey("local", 64): 8.0}
        costs = MeasuredCosts(replay_ms, {"global": {64: 90.0}, "local": {64: 90.0}})
        weigh = ItemWeights(replay_ms, costs)
        assert weigh([item({"global": 32, "local": 16})]) == [1.0 + 2.0]
        assert weigh([item({"global": 32, "local": 0})]) == [1.0]

    def test_an_axis_without_graphs_is_eager(self) -> None:
        replay_ms = {GraphKey("default", 64, (1,)): 2.0}
        costs = MeasuredCosts(replay_ms, {"default": {64: 5.0}})
        weights = ItemWeights(replay_ms, costs)([item(64, (1,)), item(64, (2,))])
        assert weights == [2.0, 5.0]

    def test_time_and_not_size_is_balanced(self) -> None:
        # A local token costs four global ones.
        replay_ms = {GraphKey("global", 64): 2.0, GraphKey("local", 64): 8.0}
        costs = MeasuredCosts(replay_ms, {"global": {64: 90.0}, "local": {64: 90.0}})
        specs = [item({"global": 4, "local": 16})] + [
            item({"global": 17, "local": 0}) for _ in range(4)
        ]
        by_time = assign_items(specs, 2, ItemWeights(replay_ms, costs)(specs))
        assert by_time.items == ((0,), (1, 2, 3, 4))


@settings(deadline=None)
@given(cases(), st.integers(1, 4))
def test_plans_of_all_ranks_together_are_a_plan(case: Case, ranks: int) -> None:
    assignment = assign_items(
        case.specs, ranks, ItemWeights(case.capacities, None)(case.specs)
    )
    planner = Planner(case.capacities, case.paths, dropped=case.dropped)
    placed: list[int] = []
    for items in assignment.items:
        own = [case.specs[i] for i in items]
        plan = planner.plan(own)
        share = Case(case.paths, case.capacities, case.dropped, own)
        check_plan(share, plan)
        for before, after in zip(
            plan.sub_batches, place(plan, items).sub_batches, strict=True
        ):
            assert after.indices == tuple(items[i] for i in before.indices)
            assert after.steps == before.steps
            assert after.eager_reasons == {
                items[i]: reason for i, reason in before.eager_reasons.items()
            }
            placed += after.indices
    assert sorted(placed) == list(range(len(case.specs)))


def test_nothing_to_place() -> None:
    assert place(Plan(()), ()) == Plan(())
