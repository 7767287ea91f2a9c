# SPDX-License-Identifier: Apache-2.0
"""A toy encoder with two paths and a capture axis, without vLLM.

An item is one whole row and any number of part rows, all of one width.  The
encoder turns each row into one output token; graphs exist for some widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from vllm_encoder_cg.adapter import BufferSpec, EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import (
    BatchLimits,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)

PATHS = ("whole", "parts")


@dataclass
class ToyModel:
    """What the adapter wraps."""

    widths: tuple[int, ...] = (8, 4)
    """Widths with graphs."""
    granularity: int = 1
    """Rows of a graph are a multiple of this."""
    fails: set[tuple[str, int]] = field(default_factory=set)
    """(path, width) whose capture fails."""

    @staticmethod
    def encode(rows: torch.Tensor) -> torch.Tensor:
        """``[rows, width]`` to ``[rows, 3]``."""
        weights = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype)
        return torch.stack([rows @ weights, rows.amax(1), rows.amin(1)], dim=1)


def make_items(*items: tuple[int, int], seed: int = 0) -> dict[str, Any]:
    """Keyword arguments for items of (parts, width)."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(1 + parts, w, generator=generator) for parts, w in items]
    return {"rows": rows}


def encode_eagerly(mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What the toy makes of a batch: per item its whole row, then its parts."""
    return [ToyModel.encode(rows) for rows in mm_kwargs["rows"]]


class ToyAdapter(EncoderAdapter):
    """Drives a ``ToyModel``."""

    def unsupported_reason(self) -> str | None:
        return None

    def config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=["image"],
            buffer_keys=["rows"],
            out_hidden_size=3,
            paths={
                "whole": EncoderCudaGraphPathConfig(),
                "parts": EncoderCudaGraphPathConfig(allow_zero_tokens=True),
            },
            capture_axes=(self.model.widths,),
            axis_names=("width",),
        )

    def budget_range(self) -> tuple[int, int]:
        return 1, 16

    def capacity(self, key: GraphKey, limits: BatchLimits) -> GraphCapacity:
        multiple = self.model.granularity
        rows = -(-key.token_budget // multiple) * multiple
        return GraphCapacity(tokens=rows, items=limits.max_items)

    def buffer_specs(self, shape: GraphShape) -> dict[str, BufferSpec]:
        (width,) = shape.key.axis_keys
        assert isinstance(width, int)
        return {"rows": BufferSpec((shape.capacity.tokens, width), torch.float32)}

    def parse(self, mm_kwargs: dict[str, Any]) -> EncoderBatch | None:
        specs = [
            EncoderItemSpec(
                input_size=rows.shape[0],
                output_tokens=rows.shape[0],
                path_output_tokens={"whole": 1, "parts": rows.shape[0] - 1},
                axis_keys=(rows.shape[1],),
            )
            for rows in mm_kwargs["rows"]
        ]
        return EncoderBatch("image", specs, mm_kwargs)

    def _select(
        self, batch: EncoderBatch, indices: Sequence[int], path: str
    ) -> list[torch.Tensor]:
        part = slice(1) if path == "whole" else slice(1, None)
        return [batch.mm_kwargs["rows"][i][part] for i in indices]

    def fill(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        buffers: dict[str, torch.Tensor],
        shape: GraphShape,
    ) -> None:
        rows = torch.cat(self._select(batch, indices, shape.key.path))
        buffers["rows"][: rows.shape[0]] = rows

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        if (shape.key.path, *shape.key.axis_keys) in self.model.fails:
            raise RuntimeError("cannot be captured")
        return self.model.encode(buffers["rows"])

    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = "whole"
    ) -> torch.Tensor:
        rows = self._select(batch, indices, path)
        return torch.cat([self.model.encode(of_item) for of_item in rows])

    def sample(self, shape: GraphShape, seed: int) -> dict[str, Any]:
        (width,) = shape.key.axis_keys
        assert isinstance(width, int)
        if shape.key.path == "parts":
            return make_items((shape.capacity.tokens, width), seed=seed)
        count = min(shape.capacity.tokens, shape.capacity.items)
        return make_items(*[(0, width)] * count, seed=seed)

    def assemble(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        outputs: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        counts = [batch.specs[i].path_output_tokens["parts"] for i in indices]
        whole = outputs["whole"].split(1)
        parts = outputs["parts"].split(counts) if "parts" in outputs else whole[:0]
        if not parts:
            return list(whole)
        return [torch.cat(pair) for pair in zip(whole, parts, strict=True)]


def make_toy_config(**compilation_config: Any) -> Any:
    """As much of a ``VllmConfig`` as a manager reads."""
    multimodal = SimpleNamespace(get_limit_per_prompt=lambda modality: 0)
    return SimpleNamespace(
        additional_config={"encoder_cg": {"cost_model": False}},
        compilation_config=SimpleNamespace(
            **{
                "cudagraph_mm_encoder": True,
                "encoder_cudagraph_token_budgets": [],
                "encoder_cudagraph_max_vision_items_per_batch": 0,
                "encoder_cudagraph_max_frames_per_batch": None,
            }
            | compilation_config
        ),
        model_config=SimpleNamespace(
            multimodal_config=multimodal, served_model_name="toy"
        ),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0
        ),
    )
