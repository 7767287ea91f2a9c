# SPDX-License-Identifier: Apache-2.0
"""Finds what a CUDA graph could not capture, without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READ = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}
_MADE_FROM_HOST_VALUES = {torch.ops.aten.lift_fresh.default}


class NoHostAccess(TorchDispatchMode):
    """Raises where the host reads a tensor, or makes one from its own values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _READ:
            raise AssertionError(f"{func} reads a tensor on the host")
        if func in _MADE_FROM_HOST_VALUES:
            raise AssertionError(f"{func} copies from the host")
        return func(*args, **(kwargs or {}))


def one_hot(values: torch.Tensor, classes: int) -> torch.Tensor:
    """As PyTorch's, which checks its argument on the host on a CPU only."""
    result = values.new_zeros((*values.shape, classes))
    return result.scatter_(-1, values.unsqueeze(-1), 1)
