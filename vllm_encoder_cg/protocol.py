# SPDX-License-Identifier: Apache-2.0
"""``SupportsEncoderCudaGraph``: vLLM's protocol for encoder CUDA graphs.

A model that implements it is driven by this project's manager without change
(``native_adapter.py`` translates).  The class exists here so that code and
tests can name it without importing vLLM; a model that satisfies vLLM's own
protocol satisfies this one and the reverse.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from vllm_encoder_cg.definitions import (
        EncoderCudaGraphCaptureInputs,
        EncoderCudaGraphConfig,
        EncoderCudaGraphReplayBuffers,
        EncoderItemSpec,
    )


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """What a model offers so that its encoder can be captured."""

    supports_encoder_cudagraph: ClassVar[Literal[True]] = True

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Modalities, buffers, paths and axes of this model."""
        ...

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """``"image"`` or ``"video"``."""
        ...

    def get_max_frames_per_video(self) -> int:
        """Most frames of one video."""
        ...

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """(smallest, largest) token budget worth capturing."""
        ...

    def get_encoder_cudagraph_item_specs(
        self, mm_kwargs: dict[str, Any]
    ) -> list[EncoderItemSpec]:
        """One spec per image or video, in the order of the batch."""
        ...

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        """The keyword arguments of the items at `indices` only."""
        ...

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: tuple[Hashable, ...] | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        """Tensors of the shapes that a graph of this budget reads."""
        ...

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        path: str = "default",
    ) -> EncoderCudaGraphReplayBuffers:
        """The values of a real batch for those tensors."""
        ...

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        """The forward that is captured: ``[tokens, hidden]``."""
        ...

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        """The forward for what no graph holds: ``[tokens, hidden]``."""
        ...

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, torch.Tensor] | list[torch.Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Puts each item's embedding into `dest` under its index."""
        ...
