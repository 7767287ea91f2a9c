# SPDX-License-Identifier: Apache-2.0
"""What a plan costs: the time of its replays and of its eager forwards.

An item's attention to itself takes the same time however the item is planned,
so a replay's cost depends on its graph alone and an eager forward's on its
number of tokens; only differences between plans matter.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_encoder_cg.definitions import AxisKeys, GraphKey

if TYPE_CHECKING:
    from vllm_encoder_cg.planning.plans import Plan


class CostModel(Protocol):
    """Prices the steps of a plan, all in one unit.

    Both methods are pure and return finite numbers of at least 0; a planner may
    ask once and remember.
    """

    def replay_cost(self, key: GraphKey) -> float:
        """One replay of a graph, whatever part of it is filled."""
        ...

    def eager_cost(self, path: str, tokens: int) -> float:
        """One eager forward of a path over items of `tokens` output tokens
        together (at least 1)."""
        ...


def plan_cost(plan: Plan, costs: CostModel) -> float:
    """The cost of all steps of `plan`, in the unit of `costs`."""
    return sum(
        (
            costs.eager_cost(path, step.tokens)
            if step.key is None
            else costs.replay_cost(step.key)
        )
        for sub_batch in plan.sub_batches
        for path, step in sub_batch.steps.items()
    )


@dataclass(frozen=True)
class TokenCosts:
    """Costs in tokens, for when nothing was measured.

    The defaults are what a 27-layer tower of width 1152 shows on an H200, where
    encoding a token takes about 13 us: a replay has a fixed cost of about 2 ms,
    and an eager forward takes no less than 14 ms.  An eager forward's fixed cost is
    set higher than was seen there, so that a guess does not speak against graphs.
    """

    per_replay: float = 128.0
    """Fixed cost of a replay."""
    eager_floor: float = 1024.0
    """Below this many tokens an eager forward waits for its own launches."""
    per_eager: float = 512.0
    """Fixed cost of an eager forward."""

    def replay_cost(self, key: GraphKey) -> float:
        """The budget, which is what the GPU computes, and the fixed cost."""
        return key.token_budget + self.per_replay

    def eager_cost(self, path: str, tokens: int) -> float:
        """The tokens, at least the floor, and the fixed cost."""
        return max(self.eager_floor, tokens) + self.per_eager


_UNKNOWN_MS_PER_TOKEN = 1e9
"""In proportion to tokens, so that it adds the same to every plan of some items."""


class MeasuredCosts:
    """Costs in milliseconds, from measurements at start-up.

    An eager forward that takes longer than one of more tokens is noise, and lowered
    to that.  A replay that does is none: matrix products of some sizes are slower
    than of larger ones.  A graph that was not measured is interpolated between
    others of its path.  What is not known does not speak against graphs: replays of a
    path without measured graphs cost nothing, and an eager forward of one without
    measured eager times costs more than any replay.
    """

    def __init__(
        self,
        replay_ms: Mapping[GraphKey, float],
        eager_ms: Mapping[str, Mapping[int, float]],
    ) -> None:
        """
        Args:
            replay_ms: milliseconds per replay.
            eager_ms: per path, milliseconds by the number of output tokens.

        Raises:
            ValueError: a time that is not a positive finite number.
        """
        for name, ms in [
            *((str(key), ms) for key, ms in replay_ms.items()),
            *(
                (f"eager, path {path!r}, {tokens} tokens", ms)
                for path, by_tokens in eager_ms.items()
                for tokens, ms in by_tokens.items()
            ),
        ]:
            if not (math.isfinite(ms) and ms > 0):
                raise ValueError(
                    f"time of {name}: got {ms!r}; use milliseconds, a positive "
                    "finite number"
                )
        self.replay_ms = dict(replay_ms)
        """As measured."""
        self.eager_ms = {path: dict(times) for path, times in eager_ms.items()}
        """As measured."""
        by_group: dict[tuple[str, AxisKeys], dict[int, float]] = {}
        by_path: dict[str, dict[int, float]] = {}
        for key, ms in replay_ms.items():
            by_group.setdefault(key.group, {})[key.token_budget] = ms
            known = by_path.setdefault(key.path, {})
            known[key.token_budget] = max(ms, known.get(key.token_budget, ms))
        self._replay = {group: _Curve(times) for group, times in by_group.items()}
        self._replay_any = {
            path: _Curve(times, rising=True) for path, times in by_path.items()
        }
        self._eager = {
            path: _Curve(times, rising=True)
            for path, times in eager_ms.items()
            if times
        }

    def replay_cost(self, key: GraphKey) -> float:
        """Milliseconds of one replay."""
        curve = self._replay.get(key.group)
        if curve is None:
            curve = self._replay_any.get(key.path)
        return 0.0 if curve is None else curve(key.token_budget)

    def eager_cost(self, path: str, tokens: int) -> float:
        """Milliseconds of one eager forward."""
        curve = self._eager.get(path)
        return _UNKNOWN_MS_PER_TOKEN * tokens if curve is None else curve(tokens)


class _Curve:
    """A time over tokens: linear between measured points, level before the first,
    and beyond the last as steep as before it, but not falling.

    Args:
        times: ms by tokens.
        rising: whether to lower those above a later one.
    """

    def __init__(self, times: Mapping[int, float], *, rising: bool = False) -> None:
        self._tokens = sorted(times)
        ms = [times[tokens] for tokens in self._tokens]
        self._ms = _rising(ms) if rising else ms

    def __call__(self, tokens: int) -> float:
        xs, ys = self._tokens, self._ms
        i = bisect_left(xs, tokens)
        if i == 0:
            return ys[0]
        if i == len(xs):
            if i == 1:
                return ys[0] * tokens / xs[0]
            slope = max(0.0, ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
            return ys[-1] + slope * (tokens - xs[-1])
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + slope * (tokens - xs[i - 1])


def _rising(values: Iterable[float]) -> list[float]:
    """`values`, none above a later one."""
    lowest = math.inf
    rising = []
    for value in reversed(list(values)):
        lowest = min(lowest, value)
        rising.append(lowest)
    return rising[::-1]
