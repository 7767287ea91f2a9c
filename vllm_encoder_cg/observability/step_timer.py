# SPDX-License-Identifier: Apache-2.0
"""How long replays and eager forwards take while serving.

On a GPU a pair of CUDA events encloses a step and is read when both have passed, so
that nothing waits for the device; on a CPU ``perf_counter`` does.  About every
eighth batch is timed, at random distances so that no pattern of requests is missed,
and stands for the batches since the one before: sums are estimates that never
decrease, and exact where all batches are alike.
"""

from __future__ import annotations

import functools
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from vllm_encoder_cg.observability.metrics import EncoderStats

EVERY_BATCHES = 8
"""On average, one batch of so many is timed."""
MAX_PENDING = 256
"""Steps in flight on the device at most; further ones are not timed."""

_UNTIMED = nullcontext()


class _Events(NamedTuple):
    begin: torch.cuda.Event
    end: torch.cuda.Event


class _Pending(NamedTuple):
    events: _Events
    by_graph: bool
    weight: int


class StepTimer:
    """Adds times to `stats`.

    Args:
        device: where the encoder runs; other than CUDA and CPU nothing is timed.
        stats: gets ``replay_seconds``, ``eager_seconds`` and ``timed_batches``.
        every: on average, one batch of so many is timed; 1: each.
    """

    def __init__(
        self, device: torch.device, stats: EncoderStats, every: int = EVERY_BATCHES
    ) -> None:
        self._device = device
        self._stats = stats
        self._every = every
        self._random = random.Random(0)
        self._until_next = 1
        self._since_last = 0
        self._weight = 0
        """Batches that this one stands for; 0: it is not timed."""
        self._expects_own_path = False
        self._free: list[_Events] = []
        self._pending: deque[_Pending] = deque()

    def time_every_batch(self) -> None:
        """From now on; the sums of what follows are exact."""
        self._every = self._until_next = 1

    def begin_batch(self) -> None:
        """Decides whether the steps up to the next call are timed."""
        self._expects_own_path = False
        self._since_last += 1
        self._weight = 0
        if self._since_last < self._until_next or self._device.type not in (
            "cpu",
            "cuda",
        ):
            return
        self.collect()
        self._weight = self._since_last
        self._since_last = 0
        self._until_next = self._random.randint(1, 2 * self._every - 1)
        self._stats.timed_batches += 1

    def step(self, by_graph: bool) -> AbstractContextManager[None]:
        """Encloses one replay, or one eager forward."""
        if not self._weight:
            return _UNTIMED
        if self._device.type == "cpu":
            return self._time_on_host(by_graph)
        return self._time_on_device(by_graph)

    def expect_own_path(self) -> None:
        """Says that this batch goes to the model's ``embed_multimodal``."""
        self._expects_own_path = bool(self._weight)

    def watch(self, model: Any) -> None:
        """Times ``model.embed_multimodal`` where ``expect_own_path`` was called.

        The runner calls it after ``execute`` has returned None.
        """
        own = getattr(model, "embed_multimodal", None)
        if own is None:
            return
        own = getattr(own, "__encoder_cg_own__", own)

        @functools.wraps(own)
        def embed_multimodal(*args: Any, **kwargs: Any) -> Any:
            if not self._expects_own_path:
                return own(*args, **kwargs)
            self._expects_own_path = False
            with self.step(by_graph=False):
                return own(*args, **kwargs)

        embed_multimodal.__encoder_cg_own__ = own  # type: ignore[attr-defined]
        model.embed_multimodal = embed_multimodal

    def collect(self) -> None:
        """Adds the steps that the device has done; waits for none."""
        while self._pending and self._pending[0].events.end.query():
            events, by_graph, weight = self._pending.popleft()
            self._add(events.begin.elapsed_time(events.end) / 1e3, by_graph, weight)
            self._free.append(events)

    def _add(self, seconds: float, by_graph: bool, weight: int) -> None:
        if by_graph:
            self._stats.replay_seconds += weight * seconds
        else:
            self._stats.eager_seconds += weight * seconds

    @contextmanager
    def _time_on_host(self, by_graph: bool) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._add(time.perf_counter() - begin, by_graph, self._weight)

    @contextmanager
    def _time_on_device(self, by_graph: bool) -> Iterator[None]:
        if len(self._pending) >= MAX_PENDING:
            yield
            return
        if not self._free:
            self._free.append(
                _Events(
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
            )
        events = self._free[-1]
        events.begin.record()
        yield
        # Not reached if the step failed; the pair is then used again.
        events.end.record()
        self._free.pop()
        self._pending.append(_Pending(events, by_graph, self._weight))
