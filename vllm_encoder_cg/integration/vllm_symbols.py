# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that the integration replaces, wraps or calls.

None of them is a documented hook, so each is listed with the signature that the
code here was written for.  Before anything is patched the list is compared with
the vLLM that runs; ``tests/test_vllm_symbols.py`` has one test per entry.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from types import ModuleType
from typing import Any

_ENCODER_CUDAGRAPH = "vllm.v1.worker.encoder_cudagraph"
_INTERFACES = "vllm.model_executor.models.interfaces"
V2_INTERFACE = "vllm.v1.worker.gpu.model_states.interface"
_MANAGER = "EncoderCudaGraphManager"


@dataclass(frozen=True)
class VllmSymbol:
    """One name of vLLM, and what the code here relies on."""

    module: str
    name: str
    """Attribute of the module, with dots: ``"Worker.shutdown"``."""

    parameters: tuple[str, ...] | None = None
    """Names of all parameters of a function, in order; None: not a function."""

    fields: tuple[str, ...] = ()
    """Fields that a dataclass must have."""

    cpu_only: bool = False
    """Needed, and importable, on the CPU platform only."""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


WORKER_SYMBOLS = (
    # How vLLM creates and uses a manager: ours offers the same methods.
    VllmSymbol(
        _ENCODER_CUDAGRAPH,
        f"{_MANAGER}.__init__",
        ("self", "vllm_config", "device", "dtype", "model"),
    ),
    VllmSymbol(_ENCODER_CUDAGRAPH, f"{_MANAGER}.capture", ("self", "graph_pool")),
    VllmSymbol(_ENCODER_CUDAGRAPH, f"{_MANAGER}.execute", ("self", "mm_kwargs")),
    VllmSymbol(
        _ENCODER_CUDAGRAPH, f"{_MANAGER}.supports_modality", ("self", "modality")
    ),
    VllmSymbol(_ENCODER_CUDAGRAPH, f"{_MANAGER}.is_captured", ("self",)),
    VllmSymbol(_ENCODER_CUDAGRAPH, f"{_MANAGER}.clear", ("self",)),
    VllmSymbol(_ENCODER_CUDAGRAPH, f"{_MANAGER}.get_num_graphs_to_capture", ("self",)),
    VllmSymbol(_ENCODER_CUDAGRAPH, f"{_MANAGER}.get_cumulative_stats", ("self",)),
    # What decides whether a model gets a manager.
    VllmSymbol(_INTERFACES, "supports_encoder_cudagraph", ("model",)),
    # The V2 runner binds both by name; the module is part of V1's worker too.
    VllmSymbol(V2_INTERFACE, _MANAGER),
    VllmSymbol(V2_INTERFACE, "supports_encoder_cudagraph", ("model",)),
    VllmSymbol(
        V2_INTERFACE,
        "ModelState.__init__",
        ("self", "vllm_config", "model", "encoder_cache", "device"),
    ),
    VllmSymbol(
        "vllm.v1.worker.gpu.mm.encoder_runner", "EncoderRunner.has_cudagraph", ("self",)
    ),
    # Workers and the V1 runner.
    VllmSymbol(
        "vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ("self",)
    ),
    VllmSymbol("vllm.v1.worker.gpu_worker", "Worker.shutdown", ("self",)),
    VllmSymbol("vllm.v1.worker.gpu_worker", "Worker.get_model", ("self",)),
    # What may replace weights under captured graphs.
    VllmSymbol(
        "vllm.v1.worker.gpu_worker",
        "Worker.load_model",
        ("self", "load_dummy_weights"),
    ),
    VllmSymbol(
        "vllm.v1.worker.gpu_worker",
        "Worker.reload_weights",
        ("self", "args", "kwargs"),
    ),
    VllmSymbol("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update", ("self",)),
    VllmSymbol("vllm.v1.worker.gpu_worker", "Worker.wake_up", ("self", "tags")),
    VllmSymbol(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.compile_or_warm_up_model",
        ("self",),
        cpu_only=True,
    ),
    VllmSymbol(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._maybe_init_encoder_cudagraph_manager",
        ("self",),
    ),
    VllmSymbol(
        "vllm.config",
        "CompilationConfig",
        fields=(
            "cudagraph_mode",
            "cudagraph_mm_encoder",
            "encoder_cudagraph_token_budgets",
            "encoder_cudagraph_max_vision_items_per_batch",
            "encoder_cudagraph_max_frames_per_batch",
        ),
    ),
    VllmSymbol("vllm.config", "ModelConfig", fields=("enforce_eager",)),
)

PROCESS_SYMBOLS = (
    VllmSymbol(
        "vllm.v1.worker.worker_base",
        "WorkerBase.__init__",
        (
            "self",
            "vllm_config",
            "local_rank",
            "rank",
            "distributed_init_method",
            "is_driver_worker",
        ),
    ),
    # Its arguments are passed on, whatever they are.
    VllmSymbol("vllm.engine.arg_utils", "EngineArgs.create_engine_config"),
    VllmSymbol("vllm.envs", "environment_variables"),
)
"""Needed in every process, not only where a worker is built."""


def resolve(module: str, name: str) -> tuple[ModuleType | type, str, Any]:
    """Find what `name` is an attribute of, the attribute's own name, and its value.

    Raises:
        ImportError: `module` cannot be imported.
        AttributeError: it has no such attribute.

    """
    *owners, attribute = name.split(".")
    owner = reduce(getattr, owners, import_module(module))
    return owner, attribute, getattr(owner, attribute)


def find_difference(symbol: VllmSymbol) -> str | None:
    """Say how the running vLLM differs from `symbol`; None if it does not."""
    try:
        _, _, value = resolve(symbol.module, symbol.name)
    except Exception as error:  # an import can fail in any way
        return f"{symbol} is missing ({type(error).__name__}: {error})"
    if symbol.parameters is not None:
        found = tuple(inspect.signature(value).parameters)
        if found != symbol.parameters:
            return (
                f"{symbol} has parameters ({', '.join(found)}), expected "
                f"({', '.join(symbol.parameters)})"
            )
    if symbol.fields:
        known = {field.name for field in dataclasses.fields(value)}
        if missing := [name for name in symbol.fields if name not in known]:
            return f"{symbol} lacks the fields {', '.join(missing)}"
    return None


def find_differences(
    symbols: tuple[VllmSymbol, ...], *, on_cpu: bool = False
) -> list[str]:
    """All differences from `symbols`, in their order; empty if there are none."""
    wanted = (symbol for symbol in symbols if on_cpu or not symbol.cpu_only)
    return [difference for symbol in wanted if (difference := find_difference(symbol))]
