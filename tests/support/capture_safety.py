# SPDX-License-Identifier: Apache-2.0
"""Finds, without a GPU, what a CUDA graph capture would refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Reading a value on the host, making a tensor from host values, and outputs
#: whose size depends on values.
_REFUSED = (
    "_local_scalar_dense",
    "lift_fresh",
    "lift_fresh_copy",
    "nonzero",
    "masked_select",
    "_unique2",
    "equal",
)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _REFUSED:
            self.refused.append(name)
        return func(*args, **kwargs or {})


def refused_operations(forward: Callable[[], torch.Tensor]) -> list[str]:
    """Names of the operations of `forward` that a capture would refuse."""
    recorder = _Recorder()
    with torch.inference_mode(), recorder:
        forward()
    return recorder.refused
