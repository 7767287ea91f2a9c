# SPDX-License-Identifier: Apache-2.0
"""The environment variables that this package reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_encoder_cg.logger import init_logger

logger = init_logger(__name__)

DISABLE = "VLLM_ENCODER_CG_DISABLE"
"""Leave vLLM's encoder as it is, though this package is installed."""

ALLOW_UNTESTED = "VLLM_ENCODER_CG_ALLOW_UNTESTED"
"""Run with a vLLM outside the tested versions, if its interfaces still match."""

METRICS_DIR = "VLLM_ENCODER_CG_METRICS_DIR"
"""The folder through which workers' counts reach ``/metrics``.  Set by this package,
not by users; see ``prometheus.py``."""

ENVIRONMENT_VARIABLES = (DISABLE, ALLOW_UNTESTED, METRICS_DIR)

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def is_set(name: str) -> bool:
    """Whether the switch `name` is on; a value of neither kind warns and is off."""
    value = os.environ.get(name, "").strip().lower()
    if value not in _ON and value not in _OFF:
        logger.warning("%s=%s is neither 1 nor 0; taken as 0.", name, value)
    return value in _ON


def announce_to_vllm(variables: dict[str, Callable[[], Any]]) -> None:
    """Add our names to ``vllm.envs.environment_variables``.

    vLLM warns about, or refuses, ``VLLM_*`` variables that are not in it, and
    copies those that are to workers on other hosts.
    """
    for name in ENVIRONMENT_VARIABLES:
        variables.setdefault(name, partial(os.environ.get, name))
