# SPDX-License-Identifier: Apache-2.0
"""Token budgets: which graphs are captured.

From the model's (smallest, largest) budget and the user's settings to one
ascending list of budgets per path, and the limits on items and frames.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_encoder_cg.definitions import (
    BatchLimits,
    EncoderCudaGraphPathConfig,
    GraphKey,
)
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.planning.costs import TokenCosts
from vllm_encoder_cg.settings import (
    BUDGETS_FIELD,
    ITEMS_FIELD,
    CompilationFields,
    EncoderCgSettings,
    SettingError,
)

logger = init_logger(__name__)

_DENSE_TOKENS = 4096
"""Above, an encoder keeps a GPU busy whether it is launched as a graph or not, and a
batch can be split at little cost: gaps there may be wider."""
_SPARSE_WEIGHT = 1 / 4
"""What growth counts there."""
_MIN_GROWTH = 1.06
"""Closer budgets would save less time than differs from one measurement to the next."""
_FIXED_TOKENS = TokenCosts().per_replay


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

    Levels are spaced by time, not by tokens: a replay of n tokens takes about as
    long as n + 128 do (half a tile, where there are tiles), because of what every
    replay takes.  Each gap between two power-of-two levels is divided into parts of
    equal growth of that time.  The gap of the widest parts is divided further, one
    part at a time, until every budget takes at most 1.06 times as long as the one
    before, or there are `max_graphs`.  Above 4096 tokens growth counts a quarter.

    Levels are then rounded to what the matrix products round up to anyway, whose
    tiles are 64 or 128 rows high, four rows being a token in most encoders: to
    multiples of 16 tokens, of 32 from 1024 tokens on, and of 64 from 2048 on.

    Args:
        granularity: tokens of one tile, for encoders that work in whole tiles.
            Budgets are multiples of it (power-of-two levels are rounded up to
            one), except `max_budget`, which is always there as it is.
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
            min(round_up(level, granularity), max_budget)
            for level in power_of_two_levels(min_budget, max_budget)
        }
    )
    fixed = _FIXED_TOKENS if granularity == 1 else granularity / 2
    gaps = list(itertools.pairwise(anchors))
    parts = [1] * len(gaps)

    def growth(i: int) -> float:
        """Weighted logarithm of the growth in gap `i`; 0 if it is at its finest."""
        low, high = gaps[i]
        if parts[i] * _step(low, granularity) >= high - low:
            return 0.0
        weight = 1.0 if low < _DENSE_TOKENS else _SPARSE_WEIGHT
        return weight * math.log((high + fixed) / (low + fixed)) / parts[i]

    for _ in range(max_graphs - len(anchors)):
        widest = max(range(len(gaps)), key=growth, default=None)
        if widest is None or growth(widest) <= math.log(_MIN_GROWTH):
            break
        parts[widest] += 1

    levels = set(anchors)
    for (low, high), count in zip(gaps, parts, strict=True):
        for part in range(1, count):
            ratio = (high + fixed) / (low + fixed)
            level = (low + fixed) * ratio ** (part / count) - fixed
            step = _step(int(level), granularity)
            rounded = round(level / step) * step
            if low < rounded < high:
                levels.add(rounded)
    return tuple(sorted(levels))


def _step(level: int, granularity: int) -> int:
    """What levels near `level` are multiples of."""
    if granularity > 1:
        return granularity
    # Below the usual smallest budget a quarter, so that small ladders are fine too.
    most = level // 4 if level <= 64 else max(16, level // 32)
    return min(64, 1 << max(0, most.bit_length() - 1))


def within_reach(fields: CompilationFields, most_tokens: int) -> CompilationFields:
    """`fields` without budgets that no batch can fill; the largest of them becomes
    `most_tokens`.

    Args:
        most_tokens: what vLLM may have encoded at once.
    """
    beyond = [b for b in fields.token_budgets if b > most_tokens]
    if not beyond:
        return fields
    kept = (*fields.token_budgets[: -len(beyond)], most_tokens)
    kept = tuple(dict.fromkeys(kept))
    logger.warning(
        "%s: %s is more than can be encoded at once (%d tokens, by "
        "max_num_batched_tokens and max_model_len); budgets are %s",
        BUDGETS_FIELD,
        ", ".join(map(str, beyond)),
        most_tokens,
        list(kept),
    )
    return replace(fields, token_budgets=kept)


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
        SettingError: an item limit above the model's largest budget.
        ValueError: an invalid range, no paths, or a path minimum below 1.
    """
    if not paths:
        raise ValueError("paths: got none; a model has at least one encoder path")
    low, high = _usable_range(fields, budget_range)
    given, max_items = fields.token_budgets, fields.max_items
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


def _usable_range(
    fields: CompilationFields, budget_range: tuple[int, int]
) -> tuple[int, int]:
    """What automatic budgets and an inferred item limit follow from: the model's
    range, which is not looked at where the user gave both.

    Raises:
        SettingError: the item limit is above what a budget holds.
        ValueError: the range is invalid.
    """
    given, max_items = fields.token_budgets, fields.max_items
    if given and max_items:
        return given[0], given[0]
    low, high = budget_range
    _check_range(low, high)
    if max_items > high:
        raise SettingError(
            f"{ITEMS_FIELD}: got {max_items}, more than the model's largest "
            f"token budget {high}, which leaves less than one token per item; "
            f"use at most {high}"
        )
    return low, high


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def _check_range(min_budget: int, max_budget: int) -> None:
    if not 0 < min_budget <= max_budget:
        raise ValueError(
            f"token budget range: got smallest {min_budget}, largest {max_budget}; "
            "both must be positive and the smallest not above the largest"
        )
