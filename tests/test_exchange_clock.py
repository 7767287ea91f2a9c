# SPDX-License-Identifier: Apache-2.0
"""The time of a batch up to its exchange: told once it is known, and never an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_encoder_cg import exchange_clock
from vllm_encoder_cg.exchange_clock import UNKNOWN, ExchangeClock


class FakeEvent:
    """A CUDA event whose device does what the test says."""

    done = True
    broken = False
    elapsed_ms = 12.5

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error")

    def query(self) -> bool:
        self.record()
        return self.done

    def elapsed_time(self, last: Any) -> float:
        return self.elapsed_ms


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    kind = type("Event", (FakeEvent,), {})
    monkeypatch.setattr(torch.cuda, "Event", kind)
    return kind


def run_batch(clock: ExchangeClock) -> int:
    clock.begin()
    clock.end()
    return clock.elapsed_us()


def test_tells_the_time_of_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.25])
    monkeypatch.setattr(exchange_clock.time, "perf_counter", lambda: next(times))
    assert run_batch(ExchangeClock(torch.device("cpu"))) == 250_000


def test_on_a_gpu_it_is_the_devices_time(event: type[FakeEvent]) -> None:
    assert run_batch(ExchangeClock(torch.device("cuda"))) == 12_500


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_knows_nothing_of_a_batch_that_did_not_end(
    device: str, event: type[FakeEvent]
) -> None:
    clock = ExchangeClock(torch.device(device))
    assert clock.elapsed_us() == UNKNOWN
    assert run_batch(clock) != UNKNOWN
    clock.begin()
    assert clock.elapsed_us() == UNKNOWN


def test_waits_for_no_device(event: type[FakeEvent]) -> None:
    event.done = False
    assert run_batch(ExchangeClock(torch.device("cuda"))) == UNKNOWN


def test_an_error_of_the_device_is_not_raised_here(event: type[FakeEvent]) -> None:
    """A rank that raised would no longer be in step with the others."""
    clock = ExchangeClock(torch.device("cuda"))
    event.broken = True
    assert run_batch(clock) == UNKNOWN
    event.broken = False
    assert run_batch(clock) == 12_500
    event.broken = True
    assert clock.elapsed_us() == UNKNOWN


@pytest.mark.parametrize("ms", [float("nan"), float("inf"), -1.0, 1e30])
def test_a_time_that_cannot_be_is_unknown(ms: float, event: type[FakeEvent]) -> None:
    event.elapsed_ms = ms
    assert run_batch(ExchangeClock(torch.device("cuda"))) == UNKNOWN
