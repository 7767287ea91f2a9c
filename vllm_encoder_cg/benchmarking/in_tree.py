# SPDX-License-Identifier: Apache-2.0
"""vLLM's own encoder CUDA graph manager, to compare with.  Needs a GPU."""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm_encoder_cg.manager import EncoderCudaGraphManager


@dataclass(frozen=True)
class InTree:
    """A captured manager of vLLM's, and what it took."""

    manager: Any
    graphs: int
    memory_bytes: int
    seconds: float


def capture_in_tree(ours: EncoderCudaGraphManager) -> InTree:
    """vLLM's manager for the model of `ours`, captured with its defaults.

    Raises:
        ImportError: this vLLM has none.
        ValueError: its results are known to be wrong for this encoder.
        Exception: whatever it raises.
    """
    if ours.adapter.backend_name() == "FLASHINFER" and ours.budgets.limits.max_frames:
        raise ValueError(
            "with FLASHINFER and videos allowed, its embeddings are wrong and a later "
            "call accesses memory illegally (vLLM 0.33)"
        )
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    before = _memory_in_use()
    begin = time.perf_counter()
    manager = EncoderCudaGraphManager(
        ours.vllm_config, ours.device, ours.dtype, ours.model
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        manager.capture(torch.cuda.graph_pool_handle())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    graphs = sum(len(of_path) for of_path in manager.budget_graphs.values())
    return InTree(manager, graphs, _memory_in_use() - before, seconds)


def _memory_in_use() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def pack_as_reference(
    tokens: Sequence[int], budgets: Sequence[int], max_items: int
) -> list[tuple[int, int]]:
    """(tokens, budget) of each replay, as the reference design packs a batch: the
    smallest item first, as long as the sum and the count fit.

    Args:
        tokens: per item; items above the largest budget are left out.
        budgets: ascending.
    """
    replays = []
    total = count = 0
    for item in sorted(t for t in tokens if t <= budgets[-1]):
        if count and (total + item > budgets[-1] or count == max_items):
            replays.append((total, budgets[bisect_left(budgets, total)]))
            total = count = 0
        total += item
        count += 1
    if count:
        replays.append((total, budgets[bisect_left(budgets, total)]))
    return replays
