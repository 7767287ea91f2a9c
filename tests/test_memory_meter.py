# SPDX-License-Identifier: Apache-2.0
"""Graph memory is what this process took, whatever others do on the card."""

from __future__ import annotations

import pytest
import torch

from tests.support.toy_adapter import ToyModel
from tests.support.toy_manager import make_toy_manager
from vllm_encoder_cg.startup.memory_meter import MemoryMeter, believable_bytes
from vllm_encoder_cg.startup.self_check import SelfCheck

GIB = 1 << 30


@pytest.mark.parametrize(
    ("reserved", "used", "expected"),
    [
        # The driver's own part of the graphs counts.
        (3 * GIB, 3 * GIB + GIB // 2, 3 * GIB + GIB // 2),
        # Another engine started on the card, or gave memory back.
        (3 * GIB, 40 * GIB, 3 * GIB),
        (3 * GIB, -5 * GIB, 3 * GIB),
        (0, 0, 0),
    ],
)
def test_other_processes_do_not_count(reserved: int, used: int, expected: int) -> None:
    assert believable_bytes(reserved, used) == expected


def test_cpu_has_no_device_memory() -> None:
    assert MemoryMeter(torch.device("cpu")).taken_bytes() == 0


@pytest.mark.parametrize("fails", [set(), {("whole", 8), ("parts", 8)}])
def test_what_checks_and_measurements_cached_is_given_back_before_capture_ends(
    monkeypatch: pytest.MonkeyPatch, fails: set[tuple[str, int]]
) -> None:
    """vLLM's runners take what is missing then for graph memory."""
    done: list[str] = []
    check = SelfCheck.after_capture

    def after_capture(*args: object) -> None:
        done.append("checked")
        check(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(SelfCheck, "after_capture", after_capture)
    monkeypatch.setattr(
        "vllm_encoder_cg.manager.give_back_cached",
        lambda device: done.append(f"given back on {device}"),
    )
    manager = make_toy_manager(monkeypatch, ToyModel(widths=(8,), fails=fails))
    assert manager.is_captured() == (not fails)
    assert done == ["checked", "given back on cpu"]
