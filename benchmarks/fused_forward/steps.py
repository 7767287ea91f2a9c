# SPDX-License-Identifier: Apache-2.0
"""What each step of a fused forward is worth: the graph with that step undone."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks.fused_forward.graphs import ExactGraph, exact_graph
from vllm_encoder_cg.benchmarking.timing import time_in_turn
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.fused import modules
from vllm_encoder_cg.models.fused.alongside import Alongside
from vllm_encoder_cg.models.fused.attention import Attend
from vllm_encoder_cg.models.fused.modules import add_residual
from vllm_encoder_cg.models.fused.windows import WindowAttention
from vllm_encoder_cg.startup.rounding import relative_norm


def time_steps(
    fused: EncoderCudaGraphManager, mm_kwargs: dict[str, Any], rounds: int
) -> dict[str, float]:
    """Milliseconds of the fused graph for exactly this batch, whole and with one
    thing changed."""
    changes: dict[str, list[Any]] = {
        "all": [],
        "activation in a kernel of its own": [
            mock.patch.object(modules, "is_plain", lambda module: False)
        ],
        "norms and additions apart": [
            mock.patch.object(modules.Norm, "add", _add_and_norm_apart)
        ],
        "attention through vLLM's layer": [mock.patch.object(Attend, "direct", False)],
        "nothing alongside": [mock.patch.object(Alongside, "run", _run_in_line)],
        "windows not in one tile": [
            mock.patch.object(WindowAttention, "direct_windows", False)
        ],
        "no short attention": [mock.patch.object(Attend, "short_rows", 0)],
        "short attention up to 2048 rows": [
            mock.patch.object(Attend, "short_rows", 2048)
        ],
        "FlashAttention chooses its splits": [mock.patch.object(Attend, "splits", 0)],
    }
    calls: dict[str, ExactGraph] = {}
    for name, patches in changes.items():
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            try:
                calls[name] = exact_graph(fused, mm_kwargs)
            except Exception as error:
                print(f"step {name!r}: {type(error).__name__}: {error}", flush=True)
    for name, graph in calls.items():
        graph()
        difference = relative_norm(graph.output, calls["all"].output)
        if not difference < 1e-2:
            print(f"step {name!r}: WRONG, differs by {difference:.1e}", flush=True)
    times = time_in_turn(calls, fused.device, rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def _run_in_line(alongside: Any, call: Callable[..., Any], x: Any) -> Any:
    return call(x)


def _add_and_norm_apart(norm: Any, x: Any, delta: Any, scale: Any = None) -> Any:
    total = x if delta is None else add_residual(x, delta, scale)
    return total, norm._module(total)
