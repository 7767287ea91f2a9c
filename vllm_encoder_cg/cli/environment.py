# SPDX-License-Identifier: Apache-2.0
"""What the commands set before they import vLLM."""

from __future__ import annotations

import os


def prepare_vllm(
    *, offline: bool, verbose: bool = False, quiet_level: str = "ERROR"
) -> None:
    """Chooses how vLLM logs and where it looks; call it before importing vLLM.

    Variables that the user has set are left alone.

    Args:
        offline: nothing is to be fetched: the checkpoint is one of ours.
        verbose: show what vLLM logs.
        quiet_level: of what is logged otherwise.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else quiet_level)
    # Standard output has the results.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # The engine in this process, so that its encoder can be looked at.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # A kernel of vLLM's for DeepSeek-OCR needs it with Triton 3.6.
    os.environ.setdefault("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
