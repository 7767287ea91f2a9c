# SPDX-License-Identifier: Apache-2.0
"""CUDA streams beside the current one."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=64)  # purposes times devices
def side_stream(purpose: str, device: int | torch.device) -> torch.cuda.Stream:
    """One for each purpose and device, the same for all who ask.

    PyTorch keeps a workspace of cuBLAS (32 MiB on Hopper) for each stream on which a
    product ever ran, and gives none back: a stream for each capture would cost that
    much each time.
    """
    return torch.cuda.Stream(device)
