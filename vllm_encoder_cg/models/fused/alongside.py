# SPDX-License-Identifier: Apache-2.0
"""Work that nothing waits for until the end, on a stream of its own.

Captured, it becomes a branch of the graph.  A small batch leaves most of a GPU idle,
so that the branch costs nothing; a large one runs as it would one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from vllm_encoder_cg import kernels
from vllm_encoder_cg.streams import side_stream

T = TypeVar("T")


class Alongside:
    """Runs calls beside the stream that is current; where there are no kernels, or it
    is told so, in line.

    Args:
        apart: whether to leave the current stream; False where calls communicate
            with other ranks, whose order must not differ.
    """

    def __init__(self, device: torch.device, *, apart: bool) -> None:
        self._stream = (
            side_stream("alongside", device)
            if apart and kernels.is_available(device)
            else None
        )
        self._inputs: list[torch.Tensor] = []

    def run(self, call: Callable[[torch.Tensor], T], x: torch.Tensor) -> T:
        """``call(x)``, begun behind what is on the current stream by now; its result
        may be used after ``join``."""
        if self._stream is None:
            return call(x)
        self._stream.wait_stream(torch.cuda.current_stream())
        # Kept, so that its memory is given to nothing else meanwhile.
        self._inputs.append(x)
        with torch.cuda.stream(self._stream):
            return call(x)

    def join(self) -> None:
        """The current stream waits for all calls."""
        if self._stream is not None and self._inputs:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._inputs.clear()
