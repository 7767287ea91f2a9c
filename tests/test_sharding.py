# SPDX-License-Identifier: Apache-2.0
"""Which rank encodes which items: a partition, balanced, the same everywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planning import Case, cases, check_plan, item
from vllm_encoder_cg.definitions import EncoderItemSpec
from vllm_encoder_cg.planning.planner import Plan, Planner
from vllm_encoder_cg.planning.sharding import (
    Assignment,
    PathRate,
    assign_items,
    place,
    weigh_items,
)

specs_of = st.lists(st.integers(0, 500).map(item), max_size=20)


def assign(*tokens: int, ranks: int = 2) -> Assignment:
    """Items of so many tokens, balanced by input size."""
    specs = [item(count) for count in tokens]
    return assign_items(specs, ranks, weigh_items(specs, None))


@settings(deadline=None)
@given(specs_of, st.integers(1, 9))
def test_every_item_on_one_rank(specs: list[EncoderItemSpec], ranks: int) -> None:
    assignment = assign_items(specs, ranks, weigh_items(specs, None))
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
    weights = weigh_items(specs, None)
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


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 30), max_size=12),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
)
def test_no_rank_ends_much_later_than_another(
    weights: list[int], late_by: list[int]
) -> None:
    """Those that begin late are given less: none ends later than it begins, or later
    than any other by more than an item."""
    specs = [item(weight) for weight in weights]
    assignment = assign_items(specs, len(late_by), weights, late_by)
    ends = [a + b for a, b in zip(late_by, assignment.tokens, strict=True)]
    for late, end in zip(late_by, ends, strict=True):
        assert end == late or end - min(ends) <= max(weights)


def test_a_rank_that_is_too_late_has_nothing() -> None:
    specs = [item(10)] * 4
    assignment = assign_items(specs, 2, [10.0] * 4, [0.0, 25.0])
    assert [len(items) for items in assignment.items] == [3, 1]
    assignment = assign_items(specs, 2, [10.0] * 4, [40.0, 0.0])
    assert assignment.items == ((), (0, 1, 2, 3))


def test_one_delay_per_rank() -> None:
    with pytest.raises(ValueError, match="late_by: got 1 for 2 ranks"):
        assign_items([item(1)], 2, [1.0], [0.0])


def test_more_ranks_than_items() -> None:
    assignment = assign(5, 9, ranks=4)
    assert assignment.items == ((1,), (0,), (), ())
    assert assignment.tokens == (9, 5, 0, 0)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(0, 8))
def test_of_fewer_items_than_ranks_each_has_its_own(
    tokens: list[int], more: int
) -> None:
    ranks = len(tokens) + more
    items = assign(*tokens, ranks=ranks).items
    assert sorted(map(len, items)) == [0] * more + [1] * len(tokens)
    # The heaviest first, so that it is known where it goes.
    assert items[0] == (tokens.index(max(tokens)),)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 16)), max_size=20),
    st.integers(1, 8),
    st.floats(0, 1),
    st.floats(0, 1e-3),
)
def test_shares_by_time_are_within_an_item_of_each_other(
    sizes: list[tuple[int, int]], ranks: int, token_ms: float, attention_ms: float
) -> None:
    specs = [item(n, sequences=frames, rows=4 * n) for n, frames in sizes]
    weights = weigh_items(specs, {"default": PathRate(token_ms, attention_ms)})
    assignment = assign_items(specs, ranks, weights)
    assert sorted(assignment.order) == list(range(len(specs)))
    loads = [sum(weights[i] for i in items) for items in assignment.items]
    assert max(loads) - min(loads) <= max(weights, default=0.0) * (1 + 1e-9)


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


def test_without_rates_an_item_weighs_its_input_size() -> None:
    spec = EncoderItemSpec(input_size=123, output_tokens=7)
    assert weigh_items([spec], None) == [123.0]


def test_paths_add_up_at_their_own_rates() -> None:
    rates = {"global": PathRate(0.5, 0.0), "local": PathRate(2.0, 0.0)}
    specs = [item({"global": 4, "local": 16}), item({"global": 4, "local": 0})]
    assert weigh_items(specs, rates) == [2.0 + 32.0, 2.0]


def test_attention_grows_with_the_square_of_a_frame() -> None:
    rates = {"default": PathRate(0.0, 1.0)}
    image = item(100, sequences=1, rows=400)
    video = item(100, sequences=4, rows=400)
    tiles = item(100)
    assert weigh_items([image, video, tiles], rates) == [160000.0, 40000.0, 0.0]


def test_an_item_without_tokens_on_a_path_weighs_nothing_there() -> None:
    rates = {"local": PathRate(1.0, 1.0)}
    spec = item({"global": 4, "local": 0}, rows=16)
    assert weigh_items([spec], rates) == [0.0]


def test_time_and_not_size_is_balanced() -> None:
    # Attention makes one large image slower than its share of the tokens.
    specs = [item(n, sequences=1, rows=4 * n) for n in (4000, *[1000] * 8)]
    linear = weigh_items(specs, {"default": PathRate(1.0, 0.0)})
    with_attention = weigh_items(specs, {"default": PathRate(1.0, 1.0 / 32000)})
    assert len(assign_items(specs, 2, linear).items[0]) == 3
    assert len(assign_items(specs, 2, with_attention).items[0]) == 1


@settings(deadline=None)
@given(cases(), st.integers(1, 8))
def test_plans_of_all_ranks_together_are_a_plan(case: Case, ranks: int) -> None:
    assignment = assign_items(case.specs, ranks, weigh_items(case.specs, None))
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
