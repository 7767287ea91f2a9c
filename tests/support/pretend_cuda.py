# SPDX-License-Identifier: Apache-2.0
"""Stands in for the parts of ``torch.cuda`` that benchmark scripts record with, so
that they run to their end without a GPU: what is recorded is run once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class _Stream:
    def synchronize(self) -> None:
        pass


class _Graph:
    def replay(self) -> None:
        pass


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return (end._time - self._time) * 1e3 + 1e-3


@contextlib.contextmanager
def pretend_cuda() -> Iterator[None]:
    """``torch.cuda.is_available()`` stays false."""
    stand_ins: dict[str, Any] = {
        "Stream": _Stream,
        "CUDAGraph": _Graph,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": lambda graph, stream=None: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "none",
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        yield
