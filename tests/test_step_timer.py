# SPDX-License-Identifier: Apache-2.0
"""Times while serving: nothing waits, sums stand for all batches."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_encoder_cg.observability import step_timer
from vllm_encoder_cg.observability.metrics import EncoderStats
from vllm_encoder_cg.observability.step_timer import StepTimer

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class Clock:
    """Stands in for ``time`` and for CUDA events; the test says how late it is."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds on the host and in the stream."""
        self.done = 0.0
        """Up to here the device has come."""
        self.events = 0

    def perf_counter(self) -> float:
        return self.now

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.events += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at: float | None = None

    def record(self) -> None:
        self.at = self._clock.now

    def query(self) -> bool:
        assert self.at is not None
        return self.at <= self._clock.done

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query() and end.query(), "would wait for the device"
        assert self.at is not None and end.at is not None
        return 1e3 * (end.at - self.at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_timer, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    return clock


def run(timer: StepTimer, clock: Clock, seconds: float, by_graph: bool = True) -> None:
    with timer.step(by_graph):
        clock.now += seconds


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_replays_and_eager_forwards_are_told_apart(
    device: torch.device, clock: Clock
) -> None:
    stats = EncoderStats()
    timer = StepTimer(device, stats, every=1)
    for _ in range(3):
        timer.begin_batch()
        run(timer, clock, 0.25)
        run(timer, clock, 2.0, by_graph=False)
        clock.done = clock.now
    timer.collect()
    assert stats.replay_seconds == pytest.approx(0.75)
    assert stats.eager_seconds == pytest.approx(6.0)
    assert stats.timed_batches == 3


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_alike_batches_sum_to_the_exact_time(
    device: torch.device, clock: Clock
) -> None:
    """Whatever is timed stands for what was not, up to the last timed batch."""
    stats = EncoderStats()
    timer = StepTimer(device, stats, every=8)
    batches = since = 0
    timed = 0
    for _ in range(1000):
        timer.begin_batch()
        run(timer, clock, 0.5)
        clock.done = clock.now
        batches += 1
        since = 0 if stats.timed_batches > timed else since + 1
        timed = stats.timed_batches
    timer.collect()
    assert stats.replay_seconds == pytest.approx(0.5 * (batches - since))
    assert 1000 / 12 < timed < 1000 / 5
    assert since < 16


def test_every_batch_may_be_timed_from_some_batch_on(clock: Clock) -> None:
    """What ``verify`` prints is exact, if one batch takes as long as all others."""
    stats = EncoderStats()
    timer = StepTimer(CPU, stats, every=8)
    for _ in range(5):
        timer.begin_batch()
    timer.time_every_batch()
    before, timed = stats.replay_seconds, stats.timed_batches
    timer.begin_batch()  # stands for what was not timed before, too
    for seconds in (1.0, 100.0, 2.0):
        timer.begin_batch()
        run(timer, clock, seconds)
    assert stats.replay_seconds - before == pytest.approx(103.0)
    assert stats.timed_batches == timed + 4


def test_sums_never_decrease(clock: Clock) -> None:
    stats = EncoderStats()
    timer = StepTimer(CUDA, stats)
    before = 0.0
    for i in range(300):
        timer.begin_batch()
        run(timer, clock, 1.0 if i % 10 else 30.0)
        clock.done = clock.now - 3.0
        timer.collect()
        assert stats.replay_seconds >= before
        before = stats.replay_seconds


def test_the_device_is_not_waited_for_and_pairs_are_used_again(clock: Clock) -> None:
    stats = EncoderStats()
    timer = StepTimer(CUDA, stats, every=1)
    for _ in range(20):
        timer.begin_batch()
        run(timer, clock, 1.0)
    assert stats.replay_seconds == 0
    clock.done = 10.0
    timer.begin_batch()
    assert stats.replay_seconds == pytest.approx(10.0)
    made = clock.events
    for _ in range(10):
        run(timer, clock, 1.0)
    assert clock.events == made


def test_a_device_that_is_far_behind_bounds_what_is_timed(clock: Clock) -> None:
    stats = EncoderStats()
    timer = StepTimer(CUDA, stats, every=1)
    timer.begin_batch()
    for _ in range(3 * step_timer.MAX_PENDING):
        run(timer, clock, 1.0)
    assert clock.events == 2 * step_timer.MAX_PENDING
    clock.done = clock.now
    timer.collect()
    assert stats.replay_seconds == pytest.approx(step_timer.MAX_PENDING)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_step_that_raises_is_not_counted(device: torch.device, clock: Clock) -> None:
    stats = EncoderStats()
    timer = StepTimer(device, stats, every=1)
    timer.begin_batch()
    with pytest.raises(RuntimeError, match="of the step"), timer.step(True):
        raise RuntimeError("of the step")
    run(timer, clock, 1.0)
    clock.done = clock.now
    timer.collect()
    assert stats.replay_seconds == pytest.approx(1.0)


def test_other_devices_are_not_timed(clock: Clock) -> None:
    stats = EncoderStats()
    timer = StepTimer(torch.device("meta"), stats, every=1)
    timer.begin_batch()
    run(timer, clock, 1.0)
    assert stats == EncoderStats()


@given(st.lists(st.booleans(), max_size=20))
def test_the_model_s_own_path_counts_where_it_was_expected(
    expected: list[bool],
) -> None:
    """The runner calls it after ``execute`` gave a batch back, and at other times."""
    clock = Clock()
    calls: Iterator[int] = iter(range(100))

    def embed_multimodal(*, value: int) -> tuple[int, int]:
        clock.now += 1.0
        return value, next(calls)

    model = SimpleNamespace(embed_multimodal=embed_multimodal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_timer, "time", clock)
        stats = EncoderStats()
        timer = StepTimer(CPU, stats, every=1)
        timer.watch(model)
        timer.watch(model)  # captured again: still once
        for i, own in enumerate(expected):
            timer.begin_batch()
            if own:
                timer.expect_own_path()
            assert model.embed_multimodal(value=7) == (7, i)
        assert stats.eager_seconds == pytest.approx(sum(expected))
        assert stats.replay_seconds == 0


def test_a_model_without_that_method_is_left_alone() -> None:
    model = SimpleNamespace()
    StepTimer(CPU, EncoderStats()).watch(model)
    assert vars(model) == {}
