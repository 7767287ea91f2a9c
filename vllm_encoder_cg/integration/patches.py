# SPDX-License-Identifier: Apache-2.0
"""The ledger: every name of vLLM that this package replaces, why, and until when.

vLLM has no hook for another encoder CUDA graph manager.  What a process needs is
decided late: in every process two functions are wrapped, and only when a worker
is built there are the others applied, so that API servers and the command line
import nothing for them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_encoder_cg.integration import early_checks, runners, status
from vllm_encoder_cg.integration.vllm_symbols import (
    V2_INTERFACE,
    WORKER_SYMBOLS,
    find_differences,
    resolve,
)
from vllm_encoder_cg.logger import init_logger

logger = init_logger(__name__)

_SENTINEL = "__vllm_encoder_cg_patch__"


@dataclass(frozen=True)
class Patch:
    """One replaced name."""

    module: str
    name: str
    """Attribute of the module, with dots."""

    replace: Callable[[Any], Any]
    """From vLLM's object to the one that takes its place."""

    why: str
    remove_when: str
    cpu_only: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass
class AppliedPatch:
    """A patch in force, with what is needed to take it back."""

    patch: Patch
    owner: Any
    attribute: str
    original: Any

    def undo(self) -> None:
        setattr(self.owner, self.attribute, self.original)


def _our_manager(_original: type) -> type:
    from vllm_encoder_cg.manager import EncoderCudaGraphManager

    return EncoderCudaGraphManager


def _adapters_too(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(original)
    def supports_encoder_cudagraph(model: Any) -> bool:
        return original(model) or runners.has_adapter(model)

    return supports_encoder_cudagraph


def _capture_without_a_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_or_warm_up_model(worker: Any) -> Any:
        # First, because vLLM's part ends with resetting the random seed.
        runners.capture_on_cpu(worker)
        result = original(worker)
        status.log_status(worker)
        return result

    return compile_or_warm_up_model


def _say_what_is_active(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_or_warm_up_model(worker: Any) -> Any:
        result = original(worker)
        status.log_status(worker)
        return result

    return compile_or_warm_up_model


def _log_final_stats_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def shutdown(worker: Any) -> Any:
        # First, because vLLM's part drops the runner's manager.
        runners.log_final_stats(worker)
        return original(worker)

    return shutdown


def _check_weights_after(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def change_weights(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(worker, *args, **kwargs)
        runners.check_weights(worker)
        return result

    return change_weights


def _activate_first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(worker: Any, *args: Any, **kwargs: Any) -> None:
        activate_in_worker()
        original(worker, *args, **kwargs)
        if _is_active():
            early_checks.check_in_worker(worker.vllm_config, worker.rank)

    return __init__


def _check_the_result(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = original(engine_args, *args, **kwargs)
        early_checks.check_config(vllm_config)
        return vllm_config

    return create_engine_config


_UNTIL_A_HOOK = "vLLM lets a plug-in name the encoder CUDA graph manager"

PROCESS_PATCHES = (
    Patch(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        _check_the_result,
        why="Here a wrong setting is an error of the command, or of vllm.LLM, like "
        "any other wrong argument; a worker's error is only in its log.",
        remove_when="vLLM lets a plug-in check additional_config",
    ),
    Patch(
        "vllm.v1.worker.worker_base",
        "WorkerBase.__init__",
        _activate_first,
        why="The first call in a process that will run a model, before the runner "
        "exists and after the worker's modules are loaded; what is wrong on this host "
        "ends the start here, not after minutes of loading weights.",
        remove_when=_UNTIL_A_HOOK,
    ),
)

WORKER_PATCHES = (
    Patch(
        "vllm.v1.worker.encoder_cudagraph",
        "EncoderCudaGraphManager",
        _our_manager,
        why="The V1 runner imports it from here when it creates the manager.",
        remove_when=_UNTIL_A_HOOK,
    ),
    Patch(
        V2_INTERFACE,
        "EncoderCudaGraphManager",
        _our_manager,
        why="The V2 runner's ModelState has bound it by name.",
        remove_when=_UNTIL_A_HOOK,
    ),
    Patch(
        "vllm.model_executor.models.interfaces",
        "supports_encoder_cudagraph",
        _adapters_too,
        why="Both runners ask it before they create a manager; it knows only models "
        "that implement vLLM's protocol, and not those with an adapter here.",
        remove_when="vLLM asks the manager class whether it supports a model",
    ),
    Patch(
        V2_INTERFACE,
        "supports_encoder_cudagraph",
        _adapters_too,
        why="The V2 runner's ModelState has bound it by name.",
        remove_when="vLLM asks the manager class whether it supports a model",
    ),
    Patch(
        "vllm.v1.worker.gpu_worker",
        "Worker.compile_or_warm_up_model",
        _say_what_is_active,
        why="One line has to say whether encoder CUDA graphs are in use, and if "
        "not, why; a plug-in that is silently inactive is a known trap.",
        remove_when="never: a plug-in hook after warm-up would serve as well",
    ),
    Patch(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.compile_or_warm_up_model",
        _capture_without_a_gpu,
        why="The CPU worker overrides the GPU worker's method and captures nothing, "
        "though its runner consults a manager.",
        remove_when="the CPU worker calls capture_model()",
        cpu_only=True,
    ),
    Patch(
        "vllm.v1.worker.gpu_worker",
        "Worker.shutdown",
        _log_final_stats_first,
        why="Statistics are logged at intervals; what came after the last one would "
        "be lost.  The CPU worker inherits the method.",
        remove_when="never: a plug-in hook at shutdown would serve as well",
    ),
    *(
        Patch(
            "vllm.v1.worker.gpu_worker",
            f"Worker.{method}",
            _check_weights_after,
            why="vLLM writes new weights where the old ones were. A loader or a "
            "quantisation that does not would leave graphs that read the old ones. "
            "The CPU worker inherits the method.",
            remove_when="never: a plug-in hook after loading would serve as well",
        )
        for method in ("load_model", "reload_weights", "finish_weight_update")
    ),
    Patch(
        "vllm.v1.worker.gpu_worker",
        "Worker.wake_up",
        _check_weights_after,
        why="Sleeping gives the memory of weights back, and waking takes it at the "
        "same addresses; were it at others, graphs would read what is not there.",
        remove_when="never: a plug-in hook after waking would serve as well",
    ),
)

_lock = threading.RLock()
_applied: list[AppliedPatch] = []
_activation_tried = False


def applied_names() -> list[str]:
    """``module:name`` of every patch in force, in the order of the ledger."""
    return [str(applied.patch) for applied in _applied]


def apply(patches: tuple[Patch, ...], *, on_cpu: bool = False) -> None:
    """Apply `patches`, all of them or none; those in force are left alone.

    Raises:
        Exception: a target is missing or its replacement cannot be made; nothing
            has been changed then.

    """
    with _lock:
        prepared: list[tuple[AppliedPatch, Any]] = []
        for patch in patches:
            if patch.cpu_only and not on_cpu:
                continue
            owner, attribute, original = resolve(patch.module, patch.name)
            # Not getattr: a subclass of our manager would inherit the mark.
            if _SENTINEL in vars(original):
                continue
            replacement = patch.replace(original)
            prepared.append(
                (AppliedPatch(patch, owner, attribute, original), replacement)
            )
        for applied, replacement in prepared:
            setattr(replacement, _SENTINEL, True)
            setattr(applied.owner, applied.attribute, replacement)
            _applied.append(applied)


def undo_all() -> None:
    """Give vLLM its own names back, and forget that they were replaced."""
    global _activation_tried
    with _lock:
        while _applied:
            _applied.pop().undo()
        _activation_tried = False


def activate_in_worker() -> None:
    """Apply the worker patches, once per process; never raises."""
    global _activation_tried
    with _lock:
        if _activation_tried:
            return
        _activation_tried = True
        try:
            _activate()
        except Exception:
            logger.warning(
                "Encoder CUDA graphs by vllm-encoder-cg are not active: they could "
                "not be put in place. vLLM is unchanged.",
                exc_info=True,
            )


def _is_active() -> bool:
    """Whether the worker patches are in force."""
    return any(applied.patch in WORKER_PATCHES for applied in _applied)


def _activate() -> None:
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if differences := find_differences(WORKER_SYMBOLS, on_cpu=on_cpu):
        logger.warning(
            "Encoder CUDA graphs by vllm-encoder-cg are not active: this vLLM "
            "differs from the versions that it was written for: %s. vLLM is "
            "unchanged.",
            "; ".join(differences),
        )
        return
    apply(WORKER_PATCHES, on_cpu=on_cpu)
