# SPDX-License-Identifier: Apache-2.0
"""Data classes that every other part shares: items, paths, graph keys.

``EncoderItemSpec``, ``BudgetGraphMetadata`` and those whose names begin with
``EncoderCudaGraph`` are vLLM's by name and fields; fields that vLLM's lack have
defaults, so an object of either origin can be read the same way.  Importing this
module loads neither torch nor vLLM.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

DEFAULT_PATH = "default"

AxisKeys: TypeAlias = tuple[Hashable, ...]

EncoderCudaGraphPaddingLogic: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], None]"

_NOTHING: Mapping[str, int] = MappingProxyType({})


class EagerReason(enum.Enum):
    """Why an item, or one path of it, was encoded without a graph.

    Logs, statistics, metrics and traces all use these members.
    """

    ABOVE_EVERY_BUDGET = "above_every_budget"
    """Its tokens or another demand exceed the capacity of every graph."""
    UNCAPTURED_LAYOUT = "uncaptured_layout"
    """No graphs exist for its capture-axis keys: a rare width, an extreme grid."""
    CHEAPER_EAGERLY = "cheaper_eagerly"
    """A graph fits, but the measured costs say that eager is faster."""
    DROPPED_GRAPH = "dropped_graph"
    """The graphs that would fit failed to capture or to pass the self-check, or were
    dropped as a weight was replaced."""
    UNCHECKED_GRAPH = "unchecked_graph"
    """The graph has yet to be compared with eager at its first use, and this input
    could not show that it is right."""
    FAILED = "failed"
    """Running it by graph raised; the log has the first such error."""
    UNSUPPORTED_INPUT = "unsupported_input"
    """Not something graphs encode: precomputed embeddings, malformed sizes."""


@dataclass
class EncoderItemSpec:
    """One image or one video of a batch, in integers."""

    input_size: int
    """Rows that the encoder reads for this item: patches, or tiles."""

    output_tokens: int
    """Rows that the encoder returns for this item."""

    path_output_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens per path; empty where there is only the default path."""

    demand: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """What else the item takes up, by the names that ``GraphCapacity.extra`` uses
    (``"sequences"``, ``"rows"``, ``"windows"``, ...)."""

    axis_keys: AxisKeys = ()
    """One key per capture axis; items of one sub-batch have equal keys."""

    def get_path_output_tokens(self, path: str) -> int:
        """Tokens of this item on `path`; 0 if it has nothing there."""
        if path == DEFAULT_PATH and not self.path_output_tokens:
            return self.output_tokens
        return self.path_output_tokens.get(path, 0)


@dataclass(frozen=True)
class EncoderCudaGraphPathConfig:
    """How one path is captured."""

    min_token_budget: int | None = None
    """Smallest budget of this path; None: the model's minimum."""

    allow_zero_tokens: bool = False
    """Whether an item may have nothing on this path."""

    token_granularity: int = 1
    """Automatic budgets are multiples of this (tokens of one tile)."""


@dataclass
class EncoderCudaGraphConfig:
    """What a model fixes for the lifetime of a manager."""

    modalities: list[str]
    """Modalities that may be encoded by graph, of ``"image"`` and ``"video"``."""

    buffer_keys: list[str]
    """Names of the tensors that a graph reads."""

    out_hidden_size: int
    """Width of an output row."""

    padding_logics: dict[str, EncoderCudaGraphPaddingLogic] = field(
        default_factory=dict
    )
    """Per buffer: how to copy a shorter value in.  Default: zero, slice copy."""

    max_frames_per_video: int = 1
    """Most frames (attention sequences) that one video of the model has."""

    paths: dict[str, EncoderCudaGraphPathConfig] = field(
        default_factory=lambda: {DEFAULT_PATH: EncoderCudaGraphPathConfig()}
    )
    """Sub-forwards captured on their own, by name."""

    capture_axes: tuple[tuple[Hashable, ...], ...] = ()
    """Per axis, the keys for which graphs exist, those of the largest buffers
    first; one graph per budget and combination of keys.  An item with any other
    key is encoded eagerly."""

    axis_names: tuple[str, ...] = ()
    """Per axis, what its keys are, for messages."""


@dataclass
class EncoderCudaGraphCaptureInputs:
    """Input tensors of one capture, as vLLM's protocol returns them."""

    values: dict[str, torch.Tensor]


@dataclass
class EncoderCudaGraphReplayBuffers:
    """New values for the captured tensors; None leaves one as it is."""

    values: dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class GraphKey:
    """Names one graph."""

    path: str
    token_budget: int
    axis_keys: AxisKeys = ()

    @property
    def group(self) -> tuple[str, AxisKeys]:
        """Path and axis keys: graphs of one group differ in their budgets alone."""
        return self.path, self.axis_keys

    def __str__(self) -> str:
        axes = f", axis keys {self.axis_keys}" if self.axis_keys else ""
        return f"path {self.path!r}, budget {self.token_budget}{axes}"


@dataclass(frozen=True)
class GraphCapacity:
    """What one replay of a graph can hold."""

    tokens: int
    """Output tokens; at least the budget."""

    items: int
    """Images and videos."""

    extra: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """Further limits by name; an item's ``demand`` under the same name counts
    against it.  A demand without a limit of that name takes nothing."""


@dataclass(frozen=True)
class BatchLimits:
    """Per-replay limits that hold for every budget."""

    max_items: int
    """``encoder_cudagraph_max_vision_items_per_batch``, given or inferred."""

    max_frames: int
    """``encoder_cudagraph_max_frames_per_batch``, given or inferred; 0 where
    videos are limited to 0."""


@dataclass
class BudgetGraphMetadata:
    """One captured graph with the buffers that it reads and writes."""

    token_budget: int
    max_batch_size: int
    max_frames_per_batch: int
    graph: Any
    """Has ``replay()``: a ``torch.cuda.CUDAGraph`` or a static replayer."""
    input_buffers: dict[str, torch.Tensor]
    output_buffer: torch.Tensor
    """``[capacity tokens, out_hidden_size]``, overwritten by the next replay."""
    axis_keys: AxisKeys = ()
    capacity: GraphCapacity | None = None
