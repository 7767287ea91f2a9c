# SPDX-License-Identifier: Apache-2.0
"""Token budgets: which graphs are captured.

From the model's (smallest, largest) budget and the user's settings to one
ascending list of budgets per path, and the limits on items and frames.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from vllm_encoder_cg.definitions import (
    BatchLimits,
    EncoderCudaGraphPathConfig,
    GraphKey,
)
from vllm_encoder_cg.settings import CompilationFields, EncoderCgSettings

# Above this many tokens an encoder keeps a GPU busy whether it is launched as a
# graph or not, and a batch can be split at little cost: gaps there may be wider.
_DENSE_TOKENS = 4096
_SPARSE_WEIGHT = 1 / 3

# Closer budgets would save less than what a replay's fixed cost hides.
_MIN_GROWTH = 1.06

_BUDGETS_FIELD = "encoder_cudagraph_token_budgets"
_ITEMS_FIELD = "encoder_cudagraph_max_vision_items_per_batch"


@dataclass(frozen=True)
class BudgetPlan:
    """Everything that fixes which graphs exist, apart from capture axes."""

    token_budgets: tuple[int, ...]
    """Budgets of a path that has no minimum of its own, ascending."""

    path_budgets: dict[str, tuple[int, ...]]
    """Per path, ascending; 0 comes first where the path may be empty, and is
    never captured."""

    limits: BatchLimits

    def graph_keys(
        self, capture_axes: Sequence[Sequence[Hashable]] = ()
    ) -> list[GraphKey]:
        """One key per path, budget and combination of axis keys: path after path,
        the largest budget first, which is the order to capture in."""
        return [
            GraphKey(path, budget, axis_keys)
            for path, budgets in self.path_budgets.items()
            for budget in reversed(budgets)
            if budget
            for axis_keys in itertools.product(*capture_axes)
        ]


def power_of_two_levels(min_budget: int, max_budget: int) -> tuple[int, ...]:
    """`min_budget`, its doubles up to `max_budget`, and `max_budget`.

    Raises:
        ValueError: unless 0 < min_budget <= max_budget.
    """
    _check_range(min_budget, max_budget)
    levels = []
    level = min_budget
    while level < max_budget:
        levels.append(level)
        level *= 2
    return (*levels, max_budget)


def fine_levels(
    min_budget: int, max_budget: int, *, granularity: int = 1, max_graphs: int = 64
) -> tuple[int, ...]:
    """The power-of-two levels with more between them, ascending.

    Each gap between two power-of-two levels is divided into parts of equal
    ratio.  The widest ratio is divided further, one part at a time, until every
    budget is at most 1.06 times the one before, or there are `max_graphs`.
    Ratios above 4096 tokens count a third.

    Args:
        granularity: tokens of one tile, for encoders that work in whole tiles.
            Budgets are multiples of it (power-of-two levels are rounded up to
            one), except `max_budget`, which is always there as it is.  At 1,
            budgets are kept a few tokens apart: steps of 8 from 64 tokens on.
        max_graphs: most levels, unless the power-of-two levels are more; then
            the result is those.

    Raises:
        ValueError: unless 0 < min_budget <= max_budget, and the others positive.
    """
    if granularity < 1 or max_graphs < 1:
        raise ValueError(
            f"granularity ({granularity}) and max_graphs ({max_graphs}) must be "
            "positive"
        )
    anchors = sorted(
        {
            min(_round_up(level, granularity), max_budget)
            for level in power_of_two_levels(min_budget, max_budget)
        }
    )
    step = granularity if granularity > 1 else max(1, min(8, min_budget // 8))
    gaps = list(itertools.pairwise(anchors))
    parts = [1] * len(gaps)

    def ratio(i: int) -> float:
        """Weighted logarithm of the growth in gap `i`; 0 if it is at its finest."""
        low, high = gaps[i]
        if parts[i] * step >= high - low:
            return 0.0
        weight = 1.0 if low < _DENSE_TOKENS else _SPARSE_WEIGHT
        return weight * math.log(high / low) / parts[i]

    for _ in range(max_graphs - len(anchors)):
        widest = max(range(len(gaps)), key=ratio, default=None)
        if widest is None or ratio(widest) <= math.log(_MIN_GROWTH):
            break
        parts[widest] += 1

    levels = set(anchors)
    for (low, high), count in zip(gaps, parts, strict=True):
        for part in range(1, count):
            level = _round_up(round(low * (high / low) ** (part / count)), step)
            if level < high:
                levels.add(level)
    return tuple(sorted(levels))


def resolve_budgets(
    fields: CompilationFields,
    settings: EncoderCgSettings,
    budget_range: tuple[int, int],
    paths: Mapping[str, EncoderCudaGraphPathConfig],
    max_frames_per_video: int,
    video_limit: int | None,
    *,
    axis_combinations: int = 1,
) -> BudgetPlan:
    """Budgets per path and limits per replay.

    The user's list is taken as given, for every path, also where it goes beyond
    the model's range or below a path's minimum.  Otherwise a path's budgets go
    from its own minimum (the model's, if it has none) to the model's maximum,
    starting no lower than an item limit that the user gave; a path whose
    minimum lies above the maximum gets the maximum alone.

    Args:
        budget_range: the model's (smallest, largest) budget; not looked at if the
            user gave both budgets and items.
        max_frames_per_video: the model's.
        video_limit: videos allowed per prompt; None: no limit.
        axis_combinations: graphs per budget, of which `settings.max_graphs`
            is the total.

    Raises:
        ValueError: an invalid range, no paths, a path minimum below 1, or an item
            limit above the smallest budget of the user's list or above the
            model's largest budget.
    """
    if not paths:
        raise ValueError("paths: got none; a model has at least one encoder path")
    max_items = fields.max_items
    given = fields.token_budgets
    if given and max_items:
        if max_items > given[0]:
            raise ValueError(
                f"{_ITEMS_FIELD}: got {max_items}, more than the smallest of "
                f"{_BUDGETS_FIELD} {list(given)}, which leaves less than one token "
                f"per item; use at most {given[0]}, or larger budgets"
            )
        low = high = given[0]
    else:
        low, high = budget_range
        _check_range(low, high)
        if max_items > high:
            raise ValueError(
                f"{_ITEMS_FIELD}: got {max_items}, more than the model's largest "
                f"token budget {high}, which leaves less than one token per item; "
                f"use at most {high}"
            )
    max_graphs = max(1, settings.max_graphs // axis_combinations)

    def ladder(config: EncoderCudaGraphPathConfig) -> tuple[int, ...]:
        if given:
            return given
        start = low if config.min_token_budget is None else config.min_token_budget
        start = min(max(start, max_items), high)
        if settings.ladder == "power_of_two":
            return power_of_two_levels(start, high)
        return fine_levels(
            start,
            high,
            granularity=config.token_granularity,
            max_graphs=max_graphs,
        )

    path_budgets = {}
    for path, config in paths.items():
        minimum = config.min_token_budget
        if minimum is not None and minimum < 1:
            raise ValueError(
                f"min_token_budget of path {path!r}: got {minimum}; use a positive "
                "integer, or None for the model's minimum"
            )
        zero = (0,) if config.allow_zero_tokens else ()
        path_budgets[path] = (*zero, *ladder(config))

    # With several paths of unlike tiles, none of them is the model's.
    tiles = {config.token_granularity for config in paths.values()}
    tile = tiles.pop() if len(tiles) == 1 else 1
    budgets = ladder(EncoderCudaGraphPathConfig(token_granularity=tile))
    if not max_items:
        max_items = min(high // low, budgets[0])
    if video_limit == 0:
        max_frames = 0
    elif fields.max_frames is not None:
        max_frames = fields.max_frames
    else:
        max_frames = max_items * max_frames_per_video
    return BudgetPlan(budgets, path_budgets, BatchLimits(max_items, max_frames))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_range(min_budget: int, max_budget: int) -> None:
    if not 0 < min_budget <= max_budget:
        raise ValueError(
            f"token budget range: got smallest {min_budget}, largest {max_budget}; "
            "both must be positive and the smallest not above the largest"
        )
