# SPDX-License-Identifier: Apache-2.0
"""Drives a model through vLLM's own ``SupportsEncoderCudaGraph`` protocol.

For models that vLLM has opted in and that have no adapter here.  The protocol
has no way to make sample input, so their graphs are compared with eager on the
first batch that uses each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_encoder_cg.adapter import BufferSpec, EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.buffers import BufferArena
from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    AxisKeys,
    BatchLimits,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.quantized_linears import quantization_refusal
from vllm_encoder_cg.ranks import EncoderMode, encoder_mode

_AXIS_KEYS_KWARG = "encoder_cudagraph_axis_keys"
"""Where ``select_encoder_cudagraph_items`` puts the keys of a batch."""


class NativeProtocolAdapter(EncoderAdapter):
    """Any object that satisfies ``SupportsEncoderCudaGraph``."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self._config: EncoderCudaGraphConfig | None = None
        self._limits = BatchLimits(max_items=1, max_frames=0)

    def unsupported_reason(self) -> str | None:
        try:
            config = self.config()
        except Exception as error:
            return f"get_encoder_cudagraph_config() failed: {error}"
        if not config.modalities:
            return "its get_encoder_cudagraph_config() names no modality"
        if len(config.paths) > 1 and config.capture_axes:
            return "its paths and capture axes cannot be told apart in replay buffers"
        if any(not axis for axis in config.capture_axes):
            return "one of its capture axes has no key"
        if reason := quantization_refusal(self.model):
            return reason
        if encoder_mode(self.vllm_config) is EncoderMode.DATA:
            # Some of vLLM's towers shard their input once more by themselves.
            return (
                "nobody has made sure that its encoder does not communicate where "
                '--mm-encoder-tp-mode is "data"; set that to "weights" to use graphs'
            )
        return None

    def config(self) -> EncoderCudaGraphConfig:
        if self._config is None:
            given = self.model.get_encoder_cudagraph_config()
            self._config = EncoderCudaGraphConfig(
                modalities=list(given.modalities),
                buffer_keys=list(given.buffer_keys),
                out_hidden_size=given.out_hidden_size,
                padding_logics=dict(given.padding_logics),
                max_frames_per_video=given.max_frames_per_video,
                paths={
                    path: EncoderCudaGraphPathConfig(
                        policy.min_token_budget, policy.allow_zero_tokens
                    )
                    for path, policy in given.paths.items()
                },
                capture_axes=tuple(tuple(axis) for axis in given.capture_axes),
            )
        return self._config

    def budget_range(self) -> tuple[int, int]:
        return self.model.get_encoder_cudagraph_budget_range(self.vllm_config)

    def capacity(self, key: GraphKey, limits: BatchLimits) -> GraphCapacity:
        # Attention sequences are not part of the protocol: a batch that has too
        # many for a captured table is refused by the size check of the copy.
        self._limits = limits
        return GraphCapacity(tokens=key.token_budget, items=limits.max_items)

    def buffer_specs(self, shape: GraphShape) -> dict[str, BufferSpec]:
        values = self._capture_values(shape, torch.device("meta"))
        return {
            name: BufferSpec(tuple(value.shape), value.dtype)
            for name, value in values.items()
        }

    def capture_buffers(
        self, shape: GraphShape, arena: BufferArena
    ) -> dict[str, torch.Tensor]:
        # Tensors of its own for every budget: a replay may leave one unwritten
        # and rely on what capture put there.
        return self._capture_values(shape, arena.device)

    def _capture_values(
        self, shape: GraphShape, device: torch.device
    ) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            inputs = self.model.prepare_encoder_cudagraph_capture_inputs(
                shape.key.token_budget,
                self._limits.max_items,
                self._limits.max_frames,
                device,
                self.vllm_config.model_config.dtype,
                path=shape.key.path,
                axis_keys=shape.key.axis_keys,
            )
        return {name: v for name, v in inputs.values.items() if v is not None}

    def parse(self, mm_kwargs: dict[str, Any]) -> EncoderBatch | None:
        if any(name.endswith("_embeds") for name in mm_kwargs):
            return None
        with torch.inference_mode():
            given = self.model.get_encoder_cudagraph_item_specs(mm_kwargs)
        specs = [
            EncoderItemSpec(
                input_size=int(spec.input_size),
                output_tokens=int(spec.output_tokens),
                path_output_tokens={
                    path: int(tokens)
                    for path, tokens in spec.path_output_tokens.items()
                },
                axis_keys=self._axis_keys(mm_kwargs, index),
            )
            for index, spec in enumerate(given)
        ]
        modality = self.model.get_input_modality(mm_kwargs)
        return EncoderBatch(modality, specs, mm_kwargs)

    def _axis_keys(self, mm_kwargs: dict[str, Any], index: int) -> AxisKeys:
        if not self.config().capture_axes:
            return ()
        selected = self.model.select_encoder_cudagraph_items(mm_kwargs, [index])
        return tuple(selected.get(_AXIS_KEYS_KWARG, ()))

    def _select(self, batch: EncoderBatch, indices: Sequence[int]) -> dict[str, Any]:
        selected = self.model.select_encoder_cudagraph_items(
            batch.mm_kwargs, list(indices)
        )
        selected.pop(_AXIS_KEYS_KWARG, None)
        return selected

    def fill(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        buffers: dict[str, torch.Tensor],
        shape: GraphShape,
    ) -> None:
        replay = self.model.prepare_encoder_cudagraph_replay_buffers(
            self._select(batch, indices),
            self._limits.max_items,
            self._limits.max_frames,
            path=shape.key.path,
        )
        padding = self.config().padding_logics
        for name, buffer in buffers.items():
            value = replay.values.get(name)
            if value is None:
                continue
            if value.ndim == 0:
                buffer.copy_(value, non_blocking=True)
                continue
            if value.shape[0] > buffer.shape[0] or value.shape[1:] != buffer.shape[1:]:
                raise ValueError(
                    f"{name} has the shape {tuple(value.shape)}, the captured buffer "
                    f"{tuple(buffer.shape)}"
                )
            if name in padding:
                padding[name](buffer, value)
            else:
                buffer.zero_()
                buffer[: value.shape[0]].copy_(value, non_blocking=True)

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        return self.model.encoder_cudagraph_forward({**buffers}, path=shape.key.path)

    def output_rows(
        self, batch: EncoderBatch, indices: Sequence[int], path: str
    ) -> int | None:
        # A model may return rows that its postprocessing turns into tokens.
        return None

    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = DEFAULT_PATH
    ) -> torch.Tensor:
        return self.model.encoder_eager_forward(self._select(batch, indices), path=path)

    def sample(self, shape: GraphShape, seed: int) -> dict[str, Any] | None:
        return None

    def assemble(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        outputs: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        embeddings: dict[int, torch.Tensor] = {}
        self.model.postprocess_encoder_output(
            outputs,
            list(indices),
            [spec.output_tokens for spec in batch.specs],
            embeddings,
            clone=False,
            batch_mm_kwargs=self._select(batch, indices),
        )
        return [embeddings[index] for index in indices]
