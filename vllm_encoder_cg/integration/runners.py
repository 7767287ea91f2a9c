# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's model runners keep the manager, and what they leave to us.

V1 (GPU and CPU): ``runner.encoder_cudagraph_manager``, created by
``_maybe_init_encoder_cudagraph_manager()``.  V2: created with the model's state,
``runner.model_state.encoder_runner.cudagraph_manager``.
"""

from __future__ import annotations

from typing import Any

from vllm_encoder_cg.logger import init_logger

logger = init_logger(__name__)


def find_manager(runner: Any) -> Any | None:
    """The manager of a V1 or V2 `runner`; None where it has none."""
    if hasattr(runner, "encoder_cudagraph_manager"):
        return runner.encoder_cudagraph_manager
    model_state = getattr(runner, "model_state", None)
    encoder_runner = getattr(model_state, "encoder_runner", None)
    return getattr(encoder_runner, "cudagraph_manager", None)


def takes_multimodal_input(runner: Any) -> bool:
    """Whether this process's part of the model encodes images or videos."""
    # V2: its state knows; the runner says so on every pipeline rank.
    owner = getattr(runner, "model_state", runner)
    return bool(getattr(owner, "supports_mm_inputs", False))


def has_adapter(model: Any) -> bool:
    """Whether an adapter of this package drives the encoder of `model`.

    False for classes, and if the adapters cannot be looked up: the question is
    asked while the server starts, which must not fail over it.
    """
    if isinstance(model, type):
        return False
    try:
        from vllm_encoder_cg.models.registry import find_adapter

        return find_adapter(model) is not None
    except Exception:
        logger.warning(
            "Cannot look for an encoder adapter for %s; only vLLM's own support "
            "for encoder CUDA graphs counts.",
            type(model).__name__,
            exc_info=True,
        )
        return False


def capture_on_cpu(worker: Any) -> None:
    """Create the manager and capture, as the GPU runners do by themselves.

    ``enforce_eager`` is not looked at: on the CPU it only makes the start faster.
    The V2 runner creates its manager itself, and does look at it.

    Raises:
        ValueError: the settings do not fit the model.

    """
    import torch

    runner = worker.model_runner
    if not worker.compilation_config.cudagraph_mm_encoder:
        return
    if hasattr(runner, "encoder_cudagraph_manager"):
        runner._maybe_init_encoder_cudagraph_manager()
    manager = find_manager(runner)
    if manager is not None and not manager.is_captured():
        with torch.inference_mode():
            manager.capture(graph_pool=None)


def check_weights(worker: Any) -> None:
    """Have the manager drop its graphs if they no longer read the weights of the
    model that `worker` runs; never raises."""
    try:
        manager = find_manager(getattr(worker, "model_runner", None))
        if manager is not None and manager.is_captured():
            manager.check_weights(worker.get_model())
    except Exception:
        logger.warning(
            "Cannot tell whether encoder CUDA graphs still read the model's weights.",
            exc_info=True,
        )


def log_final_stats(worker: Any) -> None:
    """Log what the manager counted since its last line; never raises."""
    try:
        manager = find_manager(getattr(worker, "model_runner", None))
        log = getattr(manager, "log_final_stats", None)
        if log is not None:
            log()
    except Exception:
        logger.warning("Cannot log the final encoder statistics.", exc_info=True)
