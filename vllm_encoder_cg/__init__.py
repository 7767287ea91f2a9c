# SPDX-License-Identifier: Apache-2.0
"""Encoder CUDA graphs for vLLM, as a plug-in.

Importing this package loads neither torch nor vLLM: vLLM loads it in every
process that it starts, and the planning tools run where neither is installed.
The public names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_encoder_cg.definitions import (
        BudgetGraphMetadata,
        EncoderCudaGraphCaptureInputs,
        EncoderCudaGraphConfig,
        EncoderCudaGraphPathConfig,
        EncoderCudaGraphReplayBuffers,
        EncoderItemSpec,
    )
    from vllm_encoder_cg.manager import EncoderCudaGraphManager
    from vllm_encoder_cg.protocol import SupportsEncoderCudaGraph

__version__ = "0.1.0"

__all__ = [
    "BudgetGraphMetadata",
    "EncoderCudaGraphCaptureInputs",
    "EncoderCudaGraphConfig",
    "EncoderCudaGraphManager",
    "EncoderCudaGraphPathConfig",
    "EncoderCudaGraphReplayBuffers",
    "EncoderItemSpec",
    "SupportsEncoderCudaGraph",
    "__version__",
    "register",
]

_PUBLIC_NAMES = {
    "BudgetGraphMetadata": "definitions",
    "EncoderCudaGraphCaptureInputs": "definitions",
    "EncoderCudaGraphConfig": "definitions",
    "EncoderCudaGraphManager": "manager",
    "EncoderCudaGraphPathConfig": "definitions",
    "EncoderCudaGraphReplayBuffers": "definitions",
    "EncoderItemSpec": "definitions",
    "SupportsEncoderCudaGraph": "protocol",
}


def register() -> None:
    """Entry point of group ``vllm.general_plugins``; vLLM calls it in every process.

    May be called any number of times, never initialises CUDA, and never raises:
    if something is wrong, it logs one warning and vLLM runs as without this
    package.
    """
    from vllm_encoder_cg.integration.entry_point import register as register_in_process

    register_in_process()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PUBLIC_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
