# SPDX-License-Identifier: Apache-2.0
"""Graph memory is what this process took, whatever others do on the card."""

from __future__ import annotations

import pytest
import torch

from vllm_encoder_cg.startup.memory_meter import MemoryMeter, believable_bytes

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
