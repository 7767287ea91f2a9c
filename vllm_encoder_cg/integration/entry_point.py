# SPDX-License-Identifier: Apache-2.0
"""What happens when vLLM loads this package as a plug-in."""

from __future__ import annotations

import threading

from vllm_encoder_cg import __version__
from vllm_encoder_cg.integration import environment
from vllm_encoder_cg.logger import info_early, init_logger, use_vllm_logging

logger = init_logger(__name__)

_lock = threading.Lock()
_registered = False


def register() -> None:
    """Prepare this process, once; see ``vllm_encoder_cg.register``."""
    global _registered
    with _lock:
        if _registered:
            return
        _registered = True
        try:
            _register()
        except Exception:
            logger.warning(
                "vllm-encoder-cg %s could not be registered and stays off. vLLM is "
                "unchanged.",
                __version__,
                exc_info=True,
            )


def reset() -> None:
    """Undo ``register()``: vLLM as it was, and ready to be registered again."""
    global _registered
    from vllm_encoder_cg.integration import patches
    from vllm_encoder_cg.observability import prometheus

    with _lock:
        patches.undo_all()
        prometheus.withdraw_metrics()
        _registered = False


def _register() -> None:
    import vllm.envs
    from vllm.platforms import current_platform

    from vllm_encoder_cg.integration import patches, versions, vllm_symbols

    use_vllm_logging()
    environment.announce_to_vllm(vllm.envs.environment_variables)
    if environment.is_set(environment.DISABLE):
        info_early(
            logger,
            "vllm-encoder-cg %s is switched off by %s; vLLM is unchanged.",
            __version__,
            environment.DISABLE,
        )
        # A load format that nobody names changes nothing, and comparisons with
        # vLLM alone name it.
        _register_random_loader()
        return
    untested = versions.why_untested(vllm.__version__, current_platform.device_type)
    if untested and not environment.is_set(environment.ALLOW_UNTESTED):
        logger.warning("%s", untested)
        return
    if differences := vllm_symbols.find_differences(vllm_symbols.PROCESS_SYMBOLS):
        logger.warning(
            "vllm-encoder-cg %s stays off, because this vLLM (%s) differs from the "
            "versions that it was written for: %s. vLLM is unchanged.",
            __version__,
            vllm.__version__,
            "; ".join(differences),
        )
        return
    _register_random_loader()
    patches.apply(patches.PROCESS_PATCHES)
    _offer_metrics()


def _offer_metrics() -> None:
    from vllm_encoder_cg.observability import prometheus

    try:
        prometheus.offer_metrics()
    except Exception:
        logger.warning("Encoder metrics will not be at /metrics.", exc_info=True)


def _register_random_loader() -> None:
    from vllm_encoder_cg.integration.random_loader import register_random_loader

    register_random_loader()
