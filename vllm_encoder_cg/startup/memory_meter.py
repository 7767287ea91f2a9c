# SPDX-License-Identifier: Apache-2.0
"""How much device memory a capture takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_DRIVER_SHARE = 0.5
_DRIVER_BYTES = 1 << 30


class MemoryMeter:
    """Measures from its construction on.

    PyTorch knows what it reserved, but not what the driver keeps for the graphs
    themselves; the device knows both, and also what other processes take or give
    back meanwhile.  So the device is believed as long as it says more than PyTorch
    by no more than graphs can account for, and PyTorch otherwise.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._empty_cache()
        self._before = self._used()

    def taken_bytes(self) -> int:
        """By graphs and their buffers, after giving back what is only cached."""
        self._empty_cache()
        reserved, used = (
            now - before for now, before in zip(self._used(), self._before, strict=True)
        )
        return believable_bytes(reserved, used)

    def give_back(self) -> None:
        """Returns memory that nothing uses to the device, also what an error or a
        graph that was left out still refers to in a circle."""
        gc.collect()
        self._empty_cache()

    def _empty_cache(self) -> None:
        # Without a collection, which takes a good part of a second in an engine.
        give_back_cached(self.device)

    def _used(self) -> tuple[int, int]:
        """Bytes, by PyTorch's count and by the device's."""
        if self.device.type != "cuda":
            return 0, 0
        free, total = torch.cuda.mem_get_info(self.device)
        return torch.cuda.memory_reserved(self.device), total - free


def give_back_cached(device: torch.device) -> None:
    """Returns memory that PyTorch keeps for later to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def peak_bytes(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What a call returns, and what it took at its highest.

    Returns:
        The result and bytes that PyTorch allocated beyond what was in use before,
        the result included; 0 on a CPU.
    """
    if device.type != "cuda":
        return call(), 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    return result, torch.cuda.max_memory_allocated(device) - before


def believable_bytes(reserved: int, used: int) -> int:
    """What a capture took.

    Args:
        reserved: bytes that PyTorch reserved meanwhile.
        used: bytes by which free memory of the device fell, other processes
            included.
    """
    most = reserved + max(_DRIVER_BYTES, int(reserved * _DRIVER_SHARE))
    return used if reserved <= used <= most else max(reserved, 0)
