# SPDX-License-Identifier: Apache-2.0
"""Settings refused as soon as a worker has them, before it loads a model."""

from __future__ import annotations

from typing import Any

from vllm_encoder_cg.observability.trace_writer import check_trace_file
from vllm_encoder_cg.settings import EncoderCgSettings


def check_settings(vllm_config: Any, rank: int) -> None:
    """Checks ``additional_config.encoder_cg`` if ``cudagraph_mm_encoder`` is on.

    The manager reads and checks it again, for those who build one alone.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        rank: of the worker; the first writes the trace, so that only there its
            folder has to exist.

    Raises:
        ValueError: a setting is invalid; the message names field, value and
            remedy.
    """
    if not getattr(vllm_config.compilation_config, "cudagraph_mm_encoder", False):
        return
    settings = EncoderCgSettings.from_additional_config(vllm_config.additional_config)
    if settings.trace_file is not None and rank == 0:
        check_trace_file(settings.trace_file)
