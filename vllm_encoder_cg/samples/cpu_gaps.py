# SPDX-License-Identifier: Apache-2.0
"""What two models of vLLM ask of a GPU's driver, answered where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

_FREE_BYTES, _TOTAL_BYTES = 8 << 30, 16 << 30


@contextlib.contextmanager
def without_driver() -> Iterator[None]:
    """Lets the models' own encoders run on a CPU.

    In vLLM 0.32 and 0.33, Gemma 4 asks for the free memory to choose how many
    images to encode at once, and the resampler of MiniCPM-V 2.5 to 4.0 asks
    whether the current stream is being captured.  Without a driver, PyTorch raises
    for both.
    """
    import torch

    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(
            torch.accelerator,
            "get_memory_info",
            lambda device=None: (_FREE_BYTES, _TOTAL_BYTES),
        ),
    ):
        yield
