# SPDX-License-Identifier: Apache-2.0
"""Up to how many rows of a graph one kernel is faster than FlashAttention.

Measured once per process and kind of layer, on graphs, since launching from the host
takes longer than either.  It has to be known before the first capture, so the
uncaptured forward before that measures it.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch

from vllm_encoder_cg.graphs import make_recorder

_GUESS = 512
"""Where it cannot be measured."""
_SIZES = (256, 512, 1024, 2048)
_CALLS = 10
"""Of attention per graph, as of the layers of a tower."""
_REPLAYS = 5

_known: dict[Hashable, int] = {}

AttendOnce = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a packed projection, and cos and sin of its rows."""
MakeAttend = Callable[[int, bool], AttendOnce]
"""Takes the rows of one sequence, and whether one kernel is to do it."""


def size_class(rows: int) -> int:
    """Graphs of equal class attend in the same way."""
    return bisect.bisect_left(_SIZES, rows)


def short_rows(layer: Any, device: torch.device, make_attend: MakeAttend) -> int:
    """Rows of a graph up to which one kernel is to be used; 0: never.

    Args:
        layer: an ``MMEncoderAttention``.
    """
    key = (layer.num_heads, layer.head_size, layer.dtype, device)
    if key not in _known:
        if torch.cuda.is_current_stream_capturing():
            return _GUESS
        try:
            _known[key] = _measure(layer, device, make_attend)
        except Exception:  # a GPU that is too full, a kernel that does not compile
            torch.cuda.synchronize(device)
            _known[key] = 0
    return _known[key]


def _measure(layer: Any, device: torch.device, make_attend: MakeAttend) -> int:
    best = 0
    # One of its own: the default one is the sampler's.
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), device=device, generator=generator)

    for rows in _SIZES:
        packed = random(rows, 3 * layer.num_heads * layer.head_size).to(layer.dtype)
        angles = random(rows, layer.head_size // 2)
        cos, sin = angles.cos().to(layer.dtype), angles.sin().to(layer.dtype)
        one, flash = (
            _time(device, partial(make_attend(rows, short), packed, cos, sin))
            for short in (True, False)
        )
        if one >= flash:
            break
        best = rows
    return best


def _time(device: torch.device, attend: Callable[[], torch.Tensor]) -> float:
    """Median milliseconds of a graph of several calls."""

    def layers() -> torch.Tensor:
        for _ in range(_CALLS - 1):
            attend()
        return attend()

    graph, _ = make_recorder(device, None).record(
        layers, lambda size, dtype: torch.empty(size, dtype=dtype, device=device)
    )
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
