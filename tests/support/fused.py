# SPDX-License-Identifier: Apache-2.0
"""Running a captured encoder's graphs with its fused forward.

A static replayer runs ``adapter.forward`` anew at each replay, so that one switch
turns graphs that were captured plain into fused ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_encoder_cg.adapter import EncoderAdapter


@contextlib.contextmanager
def fused(adapter: EncoderAdapter) -> Iterator[None]:
    """Replays run the fused forward inside."""
    assert adapter.fusion_refusal() is None
    assert not adapter.fused
    adapter.fused = True
    try:
        yield
    finally:
        adapter.fused = False


@contextlib.contextmanager
def counted_calls(module: torch.nn.Module) -> Iterator[list[Any]]:
    """One entry per call of `module` inside."""
    calls: list[Any] = []
    handle = module.register_forward_hook(lambda *args: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()
