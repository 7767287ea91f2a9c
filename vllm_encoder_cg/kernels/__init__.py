# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for captured forwards, one a file.

Each does what a function of plain PyTorch operations elsewhere in this package
does, which its docstring names and its test compares it with.  A module here
imports Triton; callers import it only where ``is_available`` says so.
"""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_available(device: torch.device) -> bool:
    """Whether kernels of this package run on `device`."""
    return device.type == "cuda" and torch.version.hip is None and _has_triton()
