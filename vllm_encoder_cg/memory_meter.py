# SPDX-License-Identifier: Apache-2.0
"""How much device memory a capture takes."""

from __future__ import annotations

import gc

import torch

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
        self._device = device
        self.give_back()
        self._before = self._used()

    def taken_bytes(self) -> int:
        """By graphs and their buffers, after giving back what is only cached."""
        self.give_back()
        reserved, used = (
            now - before for now, before in zip(self._used(), self._before, strict=True)
        )
        return believable_bytes(reserved, used)

    def give_back(self) -> None:
        """Returns memory that nothing uses to the device."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _used(self) -> tuple[int, int]:
        """Bytes, by PyTorch's count and by the device's."""
        if self._device.type != "cuda":
            return 0, 0
        free, total = torch.cuda.mem_get_info(self._device)
        return torch.cuda.memory_reserved(self._device), total - free


def believable_bytes(reserved: int, used: int) -> int:
    """What a capture took.

    Args:
        reserved: bytes that PyTorch reserved meanwhile.
        used: bytes by which free memory of the device fell, other processes
            included.
    """
    most = reserved + max(_DRIVER_BYTES, int(reserved * _DRIVER_SHARE))
    return used if reserved <= used <= most else max(reserved, 0)
