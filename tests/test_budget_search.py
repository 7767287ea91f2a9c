# SPDX-License-Identifier: Apache-2.0
"""The proposed budgets cost no more than any others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_encoder_cg.definitions import DEFAULT_PATH, GraphKey
from vllm_encoder_cg.planning.budget_search import (
    Choice,
    Cost,
    Demands,
    GraphMemory,
    Limits,
    choose_budgets,
)
from vllm_encoder_cg.planning.budgets import fine_levels, power_of_two_levels
from vllm_encoder_cg.planning.costs import TokenCosts


def cost_of(budgets: Sequence[int], demands: Sequence[Demands]) -> float:
    """By the definition, demand after demand."""
    total = 0.0
    for of_path in demands:
        for tokens, weight in of_path.weights.items():
            if not weight:
                continue
            fitting = [b for b in budgets if b >= tokens]
            by_graph = of_path.replay_cost(min(fitting)) if fitting else math.inf
            total += weight * min(by_graph, of_path.eager_cost(tokens))
    return total


def allowed(budgets: Sequence[int], limits: Limits) -> bool:
    if len(budgets) > limits.max_graphs:
        return False
    if limits.keep_largest and limits.largest not in budgets:
        return False
    memory = limits.memory
    return (
        not budgets
        or memory is None
        or memory.bytes_of(max(budgets), len(budgets)) <= limits.memory_bytes
    )


def brute_force(
    demands: Sequence[Demands], limits: Limits, candidates: Sequence[int]
) -> float:
    return min(
        (
            cost_of(budgets, demands)
            for size in range(len(candidates) + 1)
            for budgets in itertools.combinations(candidates, size)
            if allowed(budgets, limits)
        ),
        default=cost_of((), demands),
    )


def steps(rises: Sequence[int], first: int) -> Cost:
    """A cost that rises by the next of `rises` at each token."""
    sums = list(itertools.accumulate(rises, initial=first))
    return lambda tokens: float(sums[min(tokens, len(sums) - 1)])


TOKENS = st.integers(1, 12)
COSTS = st.builds(
    steps, st.lists(st.integers(0, 5), min_size=12, max_size=12), st.integers(1, 20)
)
DEMANDS = st.builds(
    Demands, st.dictionaries(TOKENS, st.integers(0, 5), max_size=6), COSTS, COSTS
)


@st.composite
def all_limits(draw: st.DrawFn) -> Limits:
    smallest = draw(st.integers(1, 4))
    largest = draw(st.none() | st.integers(smallest, 14))
    return Limits(
        max_graphs=draw(st.integers(1, 5)),
        smallest=smallest,
        largest=largest,
        keep_largest=largest is not None and draw(st.booleans()),
        memory=draw(st.none() | st.just(GraphMemory(3, 2))),
        memory_bytes=draw(st.integers(4, 60)),
    )


@given(st.lists(DEMANDS, min_size=1, max_size=2), all_limits())
def test_no_other_budgets_cost_less(demands: list[Demands], limits: Limits) -> None:
    choice = choose_budgets(demands, limits)
    high = limits.largest or 12
    every = range(limits.smallest, max(high, limits.smallest) + 1)
    kept = limits.keep_largest and choice.budgets == ()
    assert choice.cost == pytest.approx(cost_of(choice.budgets, demands))
    assert kept or allowed(choice.budgets, limits)
    assert choice.cost <= brute_force(demands, limits, every) + 1e-9
    assert list(choice.budgets) == sorted(set(choice.budgets))
    assert all(limits.smallest <= b <= max(every) for b in choice.budgets)


@given(DEMANDS, st.integers(2, 4), st.integers(1, 3))
def test_granularity(demands: Demands, granularity: int, max_graphs: int) -> None:
    limits = Limits(max_graphs, granularity=granularity)
    choice = choose_budgets([demands], limits)
    multiples = range(granularity, 12 + granularity, granularity)
    assert all(budget % granularity == 0 for budget in choice.budgets)
    assert choice.cost == pytest.approx(brute_force([demands], limits, multiples))


@given(DEMANDS)
def test_no_more_budgets_than_help(demands: Demands) -> None:
    choice = choose_budgets([demands], Limits(6))
    for size in range(len(choice.budgets)):
        fewer = choose_budgets([demands], Limits(max(1, size)))
        assert fewer.cost > choice.cost or not size


def token_demands(weights: dict[int, float]) -> Demands:
    costs = TokenCosts()
    return Demands(
        weights,
        lambda budget: costs.replay_cost(GraphKey(DEFAULT_PATH, budget)),
        lambda tokens: costs.eager_cost(DEFAULT_PATH, tokens),
    )


def test_one_size_needs_one_budget() -> None:
    choice = choose_budgets([token_demands({300: 1000})], Limits(64))
    assert choice == Choice((300,), 1000 * 428.0)


@given(st.dictionaries(st.integers(1, 4096), st.integers(1, 50), min_size=1))
def test_never_worse_than_the_ladders(weights: dict[int, float]) -> None:
    demands = [token_demands(weights)]
    for ladder in (power_of_two_levels(64, 4096), fine_levels(64, 4096)):
        choice = choose_budgets(demands, Limits(len(ladder)))
        assert choice.cost <= cost_of(ladder, demands) + 1e-6


def test_thousands_of_sizes_are_merged() -> None:
    demands = Demands(dict.fromkeys(range(1, 6001), 1), float, lambda tokens: 1e6)
    choice = choose_budgets([demands], Limits(8))
    assert len(choice.budgets) == 8
    assert 6000 <= choice.budgets[-1] < 6004


def test_memory_lowers_the_largest_budget() -> None:
    demands = [token_demands({100: 10, 1000: 10})]
    limits = Limits(8, memory=GraphMemory(1.0, 10.0), memory_bytes=500.0)
    assert choose_budgets(demands, limits).budgets == (100,)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (Limits(0), "max_graphs"),
        (Limits(1, smallest=0), "smallest"),
        (Limits(1, granularity=0), "granularity"),
        (Limits(1, smallest=8, largest=7), "largest"),
        (Limits(1, keep_largest=True), "keep_largest"),
    ],
)
def test_wrong_limits(limits: Limits, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        choose_budgets([token_demands({10: 1})], limits)
