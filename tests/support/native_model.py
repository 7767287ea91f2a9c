# SPDX-License-Identifier: Apache-2.0
"""A toy encoder as vLLM's own models are: it implements vLLM's protocol only.

Patches of all images are rows; every row is mixed with the mean of its image,
and every two rows become one token.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.v1.worker.encoder_cudagraph_defs import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)

PATCH, HIDDEN = 6, 8


def repeat_last(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """A padding rule: unused images are empty."""
    buffer.fill_(value[-1])
    buffer[: value.shape[0]].copy_(value)


class NativeModel(torch.nn.Module, SupportsEncoderCudaGraph):
    """Takes ``pixel_values [patches, 6]`` and ``image_patches [images]``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.into = torch.nn.Parameter(torch.randn(PATCH, HIDDEN, generator=generator))
        self.out = torch.nn.Parameter(
            torch.randn(2 * HIDDEN, HIDDEN, generator=generator)
        )

    def _encode(self, pixels: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(pixels.shape[0], dtype=torch.int32)
        image = torch.searchsorted(starts[1:], rows, right=True)
        hidden = pixels @ self.into
        sums = torch.zeros(len(starts), HIDDEN).index_add(0, image, hidden)
        counts = torch.bincount(image, minlength=len(starts)).clamp(min=1)
        means = (sums / counts[:, None])[image]
        return (hidden + torch.tanh(means)).view(-1, 2 * HIDDEN) @ self.out

    def _eager(self, mm_kwargs: dict[str, Any]) -> torch.Tensor:
        return self._encode(mm_kwargs["pixel_values"], self._starts(mm_kwargs))

    def _starts(self, mm_kwargs: dict[str, Any]) -> torch.Tensor:
        ends = mm_kwargs["image_patches"].cumsum(0)
        return torch.cat([torch.zeros(1), ends]).to(torch.int32)

    def embed_multimodal(self, **mm_kwargs: Any) -> tuple[torch.Tensor, ...]:
        tokens = mm_kwargs["image_patches"] // 2
        return self._eager(mm_kwargs).split(tokens.tolist())

    # -- SupportsEncoderCudaGraph; postprocessing is vLLM's default ----------

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=["image"],
            buffer_keys=["pixel_values", "starts"],
            out_hidden_size=HIDDEN,
            padding_logics={"starts": repeat_last},
        )

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        return "image"

    def get_max_frames_per_video(self) -> int:
        return 1

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        return 4, 64

    def get_encoder_cudagraph_item_specs(
        self, mm_kwargs: dict[str, Any]
    ) -> list[EncoderItemSpec]:
        return [
            EncoderItemSpec(input_size=n, output_tokens=n // 2)
            for n in mm_kwargs["image_patches"].tolist()
        ]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        counts = mm_kwargs["image_patches"]
        parts = mm_kwargs["pixel_values"].split(counts.tolist())
        return {
            "pixel_values": torch.cat([parts[i] for i in indices]),
            "image_patches": counts[indices],
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> EncoderCudaGraphCaptureInputs:
        rows = 2 * token_budget
        starts = torch.full((max_batch_size + 1,), rows, dtype=torch.int32)
        starts[0] = 0
        return EncoderCudaGraphCaptureInputs(
            {
                "pixel_values": torch.zeros(rows, PATCH, dtype=dtype, device=device),
                "starts": starts.to(device),
            }
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        path: str = "default",
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers(
            {
                "pixel_values": mm_kwargs["pixel_values"],
                "starts": self._starts(mm_kwargs),
            }
        )

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        return self._encode(inputs["pixel_values"], inputs["starts"])

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        return self._eager(mm_kwargs)


class UnlikeEager(NativeModel):
    """Its graph forward forgets that images are apart."""

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        everything = torch.tensor([0, inputs["pixel_values"].shape[0]])
        return self._encode(inputs["pixel_values"], everything.to(torch.int32))
