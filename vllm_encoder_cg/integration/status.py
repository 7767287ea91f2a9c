# SPDX-License-Identifier: Apache-2.0
"""The one line per worker that says whether encoder CUDA graphs are in use."""

from __future__ import annotations

from typing import Any

from vllm_encoder_cg import __version__
from vllm_encoder_cg.integration import runners
from vllm_encoder_cg.logger import init_logger

logger = init_logger(__name__)

_FLAG = "--compilation-config '{\"cudagraph_mm_encoder\": true}'"


def log_status(worker: Any) -> None:
    """Log one INFO line about `worker`, after its warm-up; never raises."""
    try:
        architecture = type(worker.get_model()).__name__
        reason = why_inactive(worker, architecture)
        if reason is None:
            logger.info(
                "Encoder CUDA graphs by vllm-encoder-cg %s active for %s: %s.",
                __version__,
                architecture,
                _describe_graphs(worker),
            )
        else:
            logger.info(
                "Encoder CUDA graphs by vllm-encoder-cg %s not active for %s: %s.",
                __version__,
                architecture,
                reason,
            )
    except Exception:
        logger.warning(
            "Cannot tell whether encoder CUDA graphs are active.", exc_info=True
        )


def why_inactive(worker: Any, architecture: str) -> str | None:
    """The first reason why `worker` encodes eagerly; None if it uses graphs."""
    runner = worker.model_runner
    compilation_config = worker.compilation_config
    if not runners.takes_multimodal_input(runner):
        return "no multimodal input is encoded here"
    if not compilation_config.cudagraph_mm_encoder:
        return f"cudagraph_mm_encoder is off (turn it on with {_FLAG})"
    manager = runners.find_manager(runner)
    if manager is not None and not manager.active:
        return manager.inactive_reason or "the manager cannot serve this model"
    if manager is not None and manager.is_captured():
        return None
    is_v1 = hasattr(runner, "encoder_cudagraph_manager")
    # The CPU's V1 runner is not affected by either of the next two.
    if not (is_v1 and _on_cpu()):
        if worker.model_config.enforce_eager:
            return "enforce_eager is set"
        # By its name: comparing with vLLM's enum would import its configuration.
        if is_v1 and compilation_config.cudagraph_mode.name == "NONE":
            return "cudagraph_mode is NONE, with which the V1 runner captures nothing"
    if manager is None:
        return (
            f"{architecture} has no adapter in vllm-encoder-cg and does not support "
            "encoder CUDA graphs itself"
        )
    return "the graphs were not captured"


def _describe_graphs(worker: Any) -> str:
    manager: Any = runners.find_manager(worker.model_runner)
    how = " (on the CPU, replayed without CUDA)" if _on_cpu() else ""
    return f"{manager.describe_graphs()}{how}"


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
