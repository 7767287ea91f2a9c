# SPDX-License-Identifier: Apache-2.0
"""Loggers of this package; under vLLM they print as vLLM's own do."""

from __future__ import annotations

import logging
import sys

_PACKAGE = "vllm_encoder_cg"


def init_logger(name: str) -> logging.Logger:
    """Return the logger called `name`; works with and without vLLM.

    Args:
        name: ``__name__`` of the calling module, which is below this package.

    """
    return logging.getLogger(name)


def use_vllm_logging() -> None:
    """Send what this package logs through vLLM's handlers, format and level.

    vLLM configures the logger ``vllm`` only, and may do so again after its
    command line is parsed.  So its handlers are not copied: its logger becomes
    the parent of ours, which follows every later change, and a user's own
    logging configuration may still name ``vllm_encoder_cg``.
    """
    logging.getLogger(_PACKAGE).parent = logging.getLogger("vllm")


def info_early(logger: logging.Logger, message: str, *args: object) -> None:
    """As ``logger.info``, and seen where no logging has been configured yet.

    ``LLM(...)`` loads plug-ins before vLLM configures its logging; Python drops
    INFO there, while it prints warnings.
    """
    if logger.hasHandlers():
        logger.info(message, *args, stacklevel=2)
    else:
        print(message % args, file=sys.stderr)
