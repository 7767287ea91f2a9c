# SPDX-License-Identifier: Apache-2.0
"""Looking into an engine that runs in this process."""

from __future__ import annotations

from typing import Any

from vllm_encoder_cg.integration.runners import find_manager


def manager_of(llm: Any) -> Any | None:
    """The encoder graph manager of a ``vllm.LLM``; None where it has none.

    The engine must run in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) on
    one rank.
    """
    engine_core = llm.llm_engine.engine_core.engine_core
    worker = engine_core.model_executor.driver_worker.worker
    return find_manager(worker.model_runner)


def forget_media(llm: Any) -> None:
    """Empties the caches that keep repeated media from the encoder; the engine
    needs ``enable_prefix_caching=False`` as well."""
    llm.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()
