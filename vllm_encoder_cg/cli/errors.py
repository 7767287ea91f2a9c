# SPDX-License-Identifier: Apache-2.0
"""How a command ends that cannot do what was asked: one line, and an exit code."""

from __future__ import annotations

import sys
import traceback
from typing import NoReturn

from pydantic import ValidationError

_OPTIONS = {"mm_encoder_attn_backend": "backend"}
"""Ours, by vLLM's field where the names differ."""


def fail(message: str, code: int = 2) -> NoReturn:
    """Ends the command with an error; 2: it could not do what was asked."""
    print(f"vllm-encoder-cg: {message}", file=sys.stderr)
    raise SystemExit(code)


def fail_with(error: Exception, *, verbose: bool = False) -> NoReturn:
    """Ends the command with what an exception says, in one line.

    Args:
        verbose: print the traceback, too.
    """
    if verbose:
        traceback.print_exception(error)
    message = _in_one_line(error)
    # Others were not raised for a user to read.
    if not isinstance(error, ValueError | OSError):
        message = f"{type(error).__name__}: {message} (--verbose shows where)"
    fail(message)


def _in_one_line(error: Exception) -> str:
    """What an exception says; the first fault of one by pydantic, without its form."""
    if not isinstance(error, ValidationError):
        return _joined(str(error))
    first = error.errors()[0]
    message = _joined(first["msg"].removeprefix("Value error, "))
    if not first["loc"]:
        return message
    field = str(first["loc"][0])
    return f"{_OPTIONS.get(field, field)}: got {first['input']!r}; {message}"


def _joined(text: str) -> str:
    return " ".join(filter(None, map(str.strip, text.splitlines())))
