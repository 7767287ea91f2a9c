# SPDX-License-Identifier: Apache-2.0
"""What happens where graphs cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_faults.support import (
    BUDGETS,
    DEEPSEEK,
    MIB,
    Context,
    capturing,
    check,
    graphs,
    serve,
    settle,
    used_memory,
    variant,
)
from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.qwen3_vl import Qwen3VLAdapter

THIRD = BUDGETS[-3]
Fault = Callable[[dict[str, torch.Tensor]], object]


def failing(fault: Fault, *budgets: int) -> type[Qwen3VLAdapter]:
    """An adapter whose forward does something wrong at some budgets."""

    class Failing(Qwen3VLAdapter):
        def forward(
            self, buffers: dict[str, torch.Tensor], shape: GraphShape
        ) -> torch.Tensor:
            result = super().forward(buffers, shape)
            if shape.key.token_budget in budgets:
                fault(buffers)
            return result

    return Failing


def use_too_much(buffers: dict[str, torch.Tensor]) -> None:
    """As a forward does whose intermediate tensors do not fit."""
    if not torch.cuda.is_available():
        raise torch.OutOfMemoryError("no memory")
    free, _ = torch.cuda.mem_get_info()
    torch.empty(free + 1024 * MIB, dtype=torch.uint8, device="cuda")


def use_too_much_in_capture(buffers: dict[str, torch.Tensor]) -> None:
    if capturing():
        use_too_much(buffers)


def read_on_the_host(buffers: dict[str, torch.Tensor]) -> None:
    """Invalidates a capture."""
    if capturing():
        buffers["tables"].sum().item()


def assert_the_rest_serves(
    manager: EncoderCudaGraphManager, lost: int, figures: dict[str, Any]
) -> None:
    manager.capture()
    assert graphs(manager) == len(BUDGETS) - lost, f"{graphs(manager)} graphs"
    figures["error"] = serve(manager)
    assert_random_numbers(figures)
    manager.clear()


def assert_random_numbers(figures: dict[str, Any]) -> None:
    """vLLM's sampler draws from the default generator."""
    if torch.cuda.is_available():
        draws = torch.empty(1024, device="cuda").exponential_()
        figures["mean_draw"] = float(draws.mean())
        assert 0.5 < figures["mean_draw"] < 2


def run_fault(context: Context, fault: Fault, *budgets: int) -> None:
    """A fault at some budgets, three times: the last takes no more memory than the
    one before, by which libraries have their workspaces."""
    base = context.encoders.get()
    used = []
    for _ in range(3):
        manager = variant(base, adapter=failing(fault, *budgets))
        assert_the_rest_serves(manager, len(budgets), context.figures)
        del manager
        used.append(used_memory())
    context.figures["leak_mib"] = (used[2] - used[1]) / MIB
    assert used[2] - used[1] <= 8 * MIB, "memory is not given back"


@check("capture: out of memory at the third of eight budgets")
def out_of_memory(context: Context) -> None:
    run_fault(context, use_too_much, THIRD)


@check("capture: out of memory while recording", gpu_only=True)
def out_of_memory_in_capture(context: Context) -> None:
    run_fault(context, use_too_much_in_capture, THIRD)


@check("capture: an operation that cannot be captured, third budget", gpu_only=True)
def illegal_operation(context: Context) -> None:
    run_fault(context, read_on_the_host, THIRD)


@check("capture: an operation that cannot be captured, last budget", gpu_only=True)
def illegal_operation_last(context: Context) -> None:
    run_fault(context, read_on_the_host, BUDGETS[0])


@check("capture: an operation that cannot be captured, all budgets", gpu_only=True)
def illegal_operation_everywhere(context: Context) -> None:
    base = context.encoders.get()
    manager = variant(base, adapter=failing(read_on_the_host, *BUDGETS))
    manager.capture()
    assert not manager.is_captured()
    assert_random_numbers(context.figures)
    context.figures["error"] = serve(base)


@check("capture: the memory pool is exhausted", gpu_only=True)
def exhausted_pool(context: Context) -> None:
    base = context.encoders.get()
    manager = variant(base)
    total = torch.cuda.mem_get_info()[1]
    settle()
    reserved = torch.cuda.memory_reserved()
    try:
        for spare in (64, 256, 512):  # MiB beyond what is taken now
            torch.cuda.set_per_process_memory_fraction((reserved + spare * MIB) / total)
            manager.capture()
            context.figures[f"graphs_within_{spare}_mib"] = graphs(manager)
            manager.clear()
            settle()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    manager.capture()
    assert graphs(manager) == len(BUDGETS), "memory came back and the graphs did not"
    context.figures["error"] = serve(manager)
    manager.clear()


@check("capture: clear and capture again, memory flat")
def capture_again(context: Context) -> None:
    manager = variant(context.encoders.get())
    used = []
    for number in range(5):
        manager.capture(None if number % 2 else _pool())
        serve(manager, batches=1)
        if number == 2:
            manager.capture()  # over itself
        manager.clear()
        used.append(used_memory())
    context.figures["used_mib"] = [value // MIB for value in used]
    assert used[-1] - used[1] <= 8 * MIB, "memory grows from capture to capture"


@check("capture: two paths within a memory limit, nothing left cached", gpu_only=True)
def within_limit(context: Context) -> None:
    """vLLM's runners count what is missing after a capture as graph memory."""
    base = context.encoders.get(DEEPSEEK, budgets=())
    limit_mib = 1024
    manager = variant(
        base, budgets=(*BUDGETS, 1536, 2048, 4096), memory_limit_gib=limit_mib / 1024
    )
    before = used_memory()
    manager.capture()
    kept = torch.cuda.memory_reserved() - before
    reported = manager.stats.graph_memory_bytes
    largest: dict[str, int] = {}
    for key in manager._graphs.graphs:
        largest[key.path] = max(key.token_budget, largest.get(key.path, 0))
    context.figures |= {
        "reported_mib": reported / MIB,
        "kept_mib": kept / MIB,
        "largest": largest,
        "seconds": manager.get_cumulative_stats()["capture_phases"],
    }
    assert len(largest) == 2, "a path has no graph"
    assert reported <= 1.02 * limit_mib * MIB, "more than the limit"
    assert kept <= reported + 64 * MIB, "memory stays cached"
    context.figures["error"] = serve(manager)
    manager.clear()


@check("capture: two managers in one pool")
def shared_pool(context: Context) -> None:
    pool = _pool()
    first, second = (variant(context.encoders.get()) for _ in range(2))
    for manager in (first, second):
        manager.capture(pool)
    for seed in range(3):
        serve(first, seed=seed)
        serve(second, seed=seed)
    first.clear()
    context.figures["error"] = serve(second)
    second.clear()


def _pool() -> Any:
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
