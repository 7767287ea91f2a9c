# SPDX-License-Identifier: Apache-2.0
"""Settings refused before a model is loaded: in the process that reads the command
line where what is said of them is enough, else in a worker."""

from __future__ import annotations

from typing import Any

from vllm_encoder_cg.observability.trace_writer import check_trace_file
from vllm_encoder_cg.settings import CompilationFields, EncoderCgSettings


def check_config(vllm_config: Any) -> None:
    """Checks all settings by their values alone if ``cudagraph_mm_encoder`` is on.

    The manager reads and checks them again, for those who build one alone.

    Args:
        vllm_config: the engine's ``VllmConfig``.

    Raises:
        ValueError: a setting is invalid; the message names field, value and
            remedy.
    """
    if not _is_asked_for(vllm_config):
        return
    CompilationFields.from_compilation_config(vllm_config.compilation_config)
    EncoderCgSettings.from_additional_config(vllm_config.additional_config)


def check_in_worker(vllm_config: Any, rank: int) -> None:
    """Checks ``additional_config.encoder_cg`` if ``cudagraph_mm_encoder`` is on, with
    what depends on the worker's host.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        rank: of the worker; the first writes the trace, so that only there its
            folder has to exist.

    Raises:
        ValueError: a setting is invalid; the message names field, value and
            remedy.
    """
    if not _is_asked_for(vllm_config):
        return
    settings = EncoderCgSettings.from_additional_config(vllm_config.additional_config)
    if settings.trace_file is not None and rank == 0:
        check_trace_file(settings.trace_file)


def _is_asked_for(vllm_config: Any) -> bool:
    return bool(getattr(vllm_config.compilation_config, "cudagraph_mm_encoder", False))
