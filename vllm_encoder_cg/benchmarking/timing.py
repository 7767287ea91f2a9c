# SPDX-License-Identifier: Apache-2.0
"""Times several ways to do the same thing, so that their ratios mean something."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]

_MIN_ROUNDS = 3
_SLOW_MS = 200.0
"""A call that takes longer is warmed up once."""


@dataclass
class CaseTimes:
    """Medians and 99th percentiles of one case, in ms."""

    case: str
    items: int
    tokens: int
    """Output tokens of all items."""
    median_ms: dict[str, float]
    """By way."""
    p99_ms: dict[str, float] = field(default_factory=dict)
    padding: dict[str, float] = field(default_factory=dict)
    """By way, the share of computed tokens that belongs to no item."""
    floor_kind: str | None = None
    """What the floor is a graph of."""

    def ratio(self, way: str, to: str) -> float:
        """How many times as long `way` takes as `to`."""
        return self.median_ms[way] / self.median_ms[to]


def time_in_turn(
    calls: Mapping[str, Call],
    device: torch.device,
    rounds: int = 30,
    warmup: int = 5,
    limit_s: float = 20.0,
) -> dict[str, list[float]]:
    """Milliseconds per call, each call synchronised before and after.

    All are called in turn within each round, so that clock drift hits them alike.

    Args:
        rounds: at most; fewer, but at least 3, where they take longer than
            `limit_s` seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(warmup):
            if _time_ms(call, device) > _SLOW_MS:
                break
    names = list(calls)
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    try:
        for round_ in range(rounds):
            if round_ >= _MIN_ROUNDS and time.perf_counter() - begin > limit_s:
                break
            # Each in turn begins, since a call finds the clocks and caches that
            # the one before it left.
            first = round_ % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(_time_ms(calls[name], device))
    finally:
        gc.enable()
    return times


def _time_ms(call: Call, device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    call()
    _synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarize(
    case: str, items: int, tokens: int, times: Mapping[str, list[float]]
) -> CaseTimes:
    """Medians and 99th percentiles of what ``time_in_turn`` returned."""
    return CaseTimes(
        case,
        items,
        tokens,
        {way: statistics.median(values) for way, values in times.items()},
        {
            way: statistics.quantiles(values, n=100, method="inclusive")[98]
            for way, values in times.items()
        },
    )
