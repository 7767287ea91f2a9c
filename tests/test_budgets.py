# SPDX-License-Identifier: Apache-2.0
"""Which budgets are captured, and what limits a replay."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_encoder_cg.definitions import (
    BatchLimits,
    EncoderCudaGraphPathConfig,
    GraphKey,
)
from vllm_encoder_cg.planning.budgets import (
    BudgetPlan,
    fine_levels,
    power_of_two_levels,
    resolve_budgets,
    within_reach,
)
from vllm_encoder_cg.settings import CompilationFields, EncoderCgSettings

ONE_PATH = {"default": EncoderCudaGraphPathConfig()}
TWO_PATHS = {
    "global": EncoderCudaGraphPathConfig(min_token_budget=272),
    "local": EncoderCudaGraphPathConfig(min_token_budget=100, allow_zero_tokens=True),
}

ranges = st.tuples(st.integers(1, 2000), st.integers(1, 40_000)).map(sorted)


def resolve(
    budgets: tuple[int, ...] = (),
    items: int = 0,
    frames: int | None = None,
    *,
    budget_range: tuple[int, int] = (64, 16384),
    paths: dict[str, EncoderCudaGraphPathConfig] = ONE_PATH,
    max_frames_per_video: int = 4,
    video_limit: int | None = None,
    axis_combinations: int = 1,
    **settings: Any,
) -> BudgetPlan:
    return resolve_budgets(
        CompilationFields(budgets, items, frames),
        EncoderCgSettings(**({"ladder": "power_of_two"} | settings)),
        budget_range,
        paths,
        max_frames_per_video,
        video_limit,
        axis_combinations=axis_combinations,
    )


# -- Ladders -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "levels"),
    [
        (64, 512, (64, 128, 256, 512)),
        (272, 13824, (272, 544, 1088, 2176, 4352, 8704, 13824)),
        (100, 13824, (100, 200, 400, 800, 1600, 3200, 6400, 12800, 13824)),
        (64, 64, (64,)),
        (64, 65, (64, 65)),
        (1, 3, (1, 2, 3)),
    ],
)
def test_power_of_two_levels(low: int, high: int, levels: tuple[int, ...]) -> None:
    assert power_of_two_levels(low, high) == levels


@given(
    ranges,
    st.sampled_from([1, 16, 100, 256, 273]),
    st.integers(1, 128),
)
def test_fine_levels_refine_the_power_of_two_levels(
    budget_range: list[int], granularity: int, max_graphs: int
) -> None:
    low, high = budget_range
    levels = fine_levels(low, high, granularity=granularity, max_graphs=max_graphs)
    reference = {
        min(-(-level // granularity) * granularity, high)
        for level in power_of_two_levels(low, high)
    }
    assert list(levels) == sorted(set(levels))
    assert set(levels) >= reference
    assert levels[0] >= low
    assert levels[-1] == high
    assert len(levels) <= max(max_graphs, len(reference))
    assert all(level % granularity == 0 for level in levels[:-1])


def times(levels: Sequence[int]) -> list[float]:
    """How much longer each level takes than the one before: every replay takes as
    long as 128 tokens do, and its tokens."""
    return [(b + 128) / (a + 128) for a, b in itertools.pairwise(levels)]


@given(ranges, st.integers(1, 128))
def test_more_graphs_widen_no_gap(budget_range: list[int], max_graphs: int) -> None:
    def widest(levels: tuple[int, ...]) -> float:
        return max(times([level for level in levels if level <= 4096]), default=1.0)

    low, high = budget_range
    few = fine_levels(low, high, max_graphs=max_graphs)
    more = fine_levels(low, high, max_graphs=max_graphs + 16)
    # Rounding a budget to its step may widen one gap by that much.
    assert widest(more) <= widest(few) * 1.07


def test_the_fine_ladder_of_a_common_model() -> None:
    levels = fine_levels(64, 16384)
    assert len(levels) <= 64
    dense = [level for level in levels if level <= 4096]
    assert max(times(dense)) < 1.1
    assert max(times(levels)) < 1.27
    # Expected padding of a batch of any size, sizes equally likely on a logarithmic
    # scale.
    for low, high, most in ((64, 1024, 0.06), (1024, 4096, 0.035)):
        part = [level for level in levels if low <= level <= high]
        growth = [b / a - 1 for a, b in itertools.pairwise(part)]
        weights = [math.log(b / a) for a, b in itertools.pairwise(part)]
        expected = sum(map(operator.mul, growth, weights)) / 2 / sum(weights)
        assert expected < most


def test_levels_fill_the_tiles_of_matrix_products() -> None:
    levels = fine_levels(64, 16384)
    assert all(level % 16 == 0 for level in levels)
    assert all(level % 32 == 0 for level in levels if level >= 1024)
    assert all(level % 64 == 0 for level in levels if level >= 2048)


def test_growth_is_not_needlessly_small() -> None:
    levels = fine_levels(256, 4096, max_graphs=1000)
    assert len(levels) < 60
    assert min(times(levels)) > 1.03


def test_tiled_towers_have_a_budget_per_tile_at_the_low_end() -> None:
    levels = fine_levels(256, 16384, granularity=256)
    assert levels[:8] == tuple(256 * tiles for tiles in range(1, 9))
    assert all(level % 256 == 0 for level in levels)
    assert levels[-1] == 16384


def test_a_maximum_between_tiles_is_kept() -> None:
    assert fine_levels(256, 1000, granularity=256) == (256, 512, 768, 1000)


@pytest.mark.parametrize("function", [power_of_two_levels, fine_levels])
@pytest.mark.parametrize("budget_range", [(0, 64), (-1, 64), (65, 64), (64, 0)])
def test_an_invalid_range_is_named(function: Any, budget_range: Any) -> None:
    low, high = budget_range
    with pytest.raises(ValueError, match=f"smallest {low}, largest {high}"):
        function(low, high)


@pytest.mark.parametrize("bad", [{"granularity": 0}, {"max_graphs": 0}])
def test_ladder_arguments_are_checked(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        fine_levels(64, 128, **bad)


# -- Budgets, items and frames ----------------------------------------------------


def test_everything_inferred() -> None:
    plan = resolve()
    levels = power_of_two_levels(64, 16384)
    assert plan == BudgetPlan(levels, {"default": levels}, BatchLimits(64, 256))


def test_the_default_ladder_is_fine() -> None:
    plan = resolve(ladder="fine")
    assert plan.token_budgets == fine_levels(64, 16384)
    assert plan.path_budgets == {"default": plan.token_budgets}


def test_inferred_items_are_at_most_the_quotient_of_the_range() -> None:
    assert resolve(budget_range=(256, 4096)).limits.max_items == 16


def test_only_items_given_raises_the_smallest_budget() -> None:
    plan = resolve(items=100)
    assert plan.token_budgets == power_of_two_levels(100, 16384)
    assert plan.limits == BatchLimits(100, 400)
    assert resolve(items=8).token_budgets[0] == 64


def test_only_budgets_given_bound_the_inferred_items() -> None:
    assert resolve((8, 512)).limits.max_items == 8
    assert resolve((512, 1024)).limits.max_items == 256
    assert resolve((512,), budget_range=(1024, 8192)).limits.max_items == 8


def test_both_given() -> None:
    plan = resolve((512, 1024), 8, budget_range=(0, 0))
    assert plan.token_budgets == (512, 1024)
    assert plan.limits == BatchLimits(8, 32)


def test_more_items_than_the_smallest_given_budget_is_an_error() -> None:
    assert resolve((8, 64), 8).limits.max_items == 8
    with pytest.raises(
        ValueError, match=r"items_per_batch: got 9.*smallest.*\[8, 64\]"
    ):
        resolve((8, 64), 9)


def test_more_items_than_the_largest_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"items_per_batch: got 65.*use at most 64"):
        resolve(items=65, budget_range=(16, 64))


def test_budgets_beyond_the_models_range_are_taken_as_given() -> None:
    assert resolve((32, 99_999)).token_budgets == (32, 99_999)


@pytest.mark.parametrize("items", [0, 8])
@pytest.mark.parametrize("budget_range", [(0, 64), (65, 64)])
def test_an_invalid_model_range_is_named(items: int, budget_range: Any) -> None:
    with pytest.raises(ValueError, match="token budget range: got smallest"):
        resolve(items=items, budget_range=budget_range)


@pytest.mark.parametrize(
    ("frames", "video_limit", "expected"),
    [
        (None, None, 64 * 4),
        (None, 1, 64 * 4),
        (32, None, 32),
        (0, 1, 0),
        (None, 0, 0),
        (32, 0, 0),
    ],
)
def test_frames(frames: int | None, video_limit: int | None, expected: int) -> None:
    plan = resolve(frames=frames, video_limit=video_limit)
    assert plan.limits.max_frames == expected


# -- Paths ---------------------------------------------------------------------------


def test_each_path_has_budgets_from_its_own_minimum() -> None:
    plan = resolve(budget_range=(272, 13824), paths=TWO_PATHS)
    assert plan.path_budgets == {
        "global": (272, 544, 1088, 2176, 4352, 8704, 13824),
        "local": (0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 13824),
    }
    assert plan.limits.max_items == 50


def test_given_budgets_hold_for_every_path() -> None:
    plan = resolve((64, 512), paths=TWO_PATHS)
    assert plan.path_budgets == {"global": (64, 512), "local": (0, 64, 512)}


def test_items_given_bound_the_budgets_of_every_path() -> None:
    plan = resolve(items=150, budget_range=(272, 13824), paths=TWO_PATHS)
    assert plan.path_budgets["global"][0] == 272
    assert plan.path_budgets["local"][:2] == (0, 150)


def test_a_path_minimum_above_the_maximum_leaves_the_maximum() -> None:
    paths = {"default": EncoderCudaGraphPathConfig(min_token_budget=9999)}
    assert resolve(paths=paths, budget_range=(64, 256)).path_budgets == {
        "default": (256,)
    }


@pytest.mark.parametrize("minimum", [0, -5])
def test_an_invalid_path_minimum_is_named(minimum: int) -> None:
    paths = {"local": EncoderCudaGraphPathConfig(min_token_budget=minimum)}
    with pytest.raises(ValueError, match=f"'local': got {minimum}"):
        resolve(paths=paths)


def test_a_model_without_paths_is_an_error() -> None:
    with pytest.raises(ValueError, match="paths"):
        resolve(paths={})


def test_granularity_applies_to_the_default_list_too() -> None:
    paths = {"default": EncoderCudaGraphPathConfig(token_granularity=256)}
    plan = resolve(paths=paths, budget_range=(256, 8192), ladder="fine")
    assert plan.token_budgets == plan.path_budgets["default"]
    assert plan.token_budgets[:3] == (256, 512, 768)


def test_the_graph_limit_counts_every_axis_combination() -> None:
    plan = resolve(ladder="fine", axis_combinations=4)
    assert len(plan.graph_keys([(1, 2), ("a", "b")])) <= 64
    assert set(plan.token_budgets) >= set(power_of_two_levels(64, 16384))


def test_graph_keys_come_largest_first_and_without_budget_zero() -> None:
    plan = resolve((64, 512), paths=TWO_PATHS)
    assert plan.graph_keys() == [
        GraphKey("global", 512),
        GraphKey("global", 64),
        GraphKey("local", 512),
        GraphKey("local", 64),
    ]
    keys = resolve((64,)).graph_keys([(70, 140), ("x",)])
    assert keys == [
        GraphKey("default", 64, (70, "x")),
        GraphKey("default", 64, (140, "x")),
    ]


@given(
    st.lists(st.integers(1, 5000), max_size=6, unique=True).map(sorted).map(tuple),
    st.integers(0, 64),
    ranges,
    st.sampled_from(["fine", "power_of_two"]),
)
def test_an_item_never_has_less_than_one_token_of_the_default_budgets(
    budgets: tuple[int, ...], items: int, budget_range: list[int], ladder: str
) -> None:
    low, high = budget_range
    try:
        plan = resolve(budgets, items, budget_range=(low, high), ladder=ladder)
    except ValueError:
        assert items > (budgets[0] if budgets else high)
        return
    assert 1 <= plan.limits.max_items <= plan.token_budgets[0]
    assert plan.path_budgets["default"] == plan.token_budgets


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((64, 256), (64, 256)),
        ((64, 1024), (64, 1024)),
        ((64, 2048), (64, 1024)),
        ((64, 1024, 10**9, 2**70), (64, 1024)),
        ((10**9,), (1024,)),
        ((), ()),
    ],
)
def test_budgets_that_no_batch_can_fill_are_not_captured(
    given: tuple[int, ...],
    kept: tuple[int, ...],
    package_log: pytest.LogCaptureFixture,
) -> None:
    """They would cost a start-up of minutes, and memory, for nothing."""
    fields = within_reach(CompilationFields(given, max_items=2), 1024)
    assert fields == CompilationFields(kept, max_items=2)
    messages = [record.getMessage() for record in package_log.records]
    assert len(messages) == (given != kept)
    for message in messages:
        assert "encoder_cudagraph_token_budgets" in message and "1024" in message
        assert "max_num_batched_tokens" in message
