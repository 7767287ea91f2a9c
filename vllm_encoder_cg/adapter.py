# SPDX-License-Identifier: Apache-2.0
"""``EncoderAdapter``: what the manager asks of a model.

vLLM's protocol has a model slice its inputs, concatenate them, build every
table on the device and return fresh tensors that the manager then copies.  An
adapter instead writes a chosen set of items straight into captured buffers: one
parse per batch, one copy per input.  ``native_adapter.py`` offers this
interface on top of any model that implements vLLM's protocol.

Life of an adapter::

    adapter = SomeAdapter(model, vllm_config)
    adapter.unsupported_reason()             # at start-up, on this instance
    shape = GraphShape(key, adapter.capacity(key, limits))
    buffers = tensors of adapter.buffer_specs(shape)
    adapter.forward(buffers, shape)          # warm-up, then captured
    batch = adapter.parse(mm_kwargs)         # per batch
    adapter.fill(batch, indices, buffers, shape)   # per replay
    adapter.assemble(batch, indices, {path: rows})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    BatchLimits,
    EncoderCudaGraphConfig,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.quantized_linears import COARSENESS, rounds_input

if TYPE_CHECKING:
    import torch

    from vllm_encoder_cg.buffers import BufferArena


@dataclass(frozen=True)
class GraphShape:
    """Fixes every shape of one graph."""

    key: GraphKey
    capacity: GraphCapacity


@dataclass(frozen=True)
class BufferSpec:
    """One captured input tensor.

    Specs of smaller budgets of a path differ from the largest one's in
    ``shape[0]`` only, and are not longer: every budget then reads a slice of
    one allocation.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class EncoderBatch:
    """One parsed batch of a single modality."""

    modality: str
    specs: list[EncoderItemSpec]
    """In the order of the batch."""
    mm_kwargs: dict[str, Any]
    """The keyword arguments as they came."""
    payload: Any = field(default=None, repr=False)
    """Whatever else the adapter parsed (grids, row offsets)."""

    def items_on(self, path: str) -> list[int]:
        """Positions of the items that have anything on `path`."""
        return [i for i, s in enumerate(self.specs) if s.get_path_output_tokens(path)]

    def tokens_on(self, path: str, indices: Sequence[int]) -> list[int]:
        """Output tokens of each item at `indices` on `path`."""
        return [self.specs[i].get_path_output_tokens(path) for i in indices]


class EncoderAdapter(ABC):
    """Drives one loaded model's encoder for the manager."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """Exact class names of the vLLM models that this adapter is for."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.model = model
        self.vllm_config = vllm_config

    @abstractmethod
    def unsupported_reason(self) -> str | None:
        """Why this instance cannot be captured (a missing tower, a backend that
        reads the host, LoRA on the tower), with the remedy; None if it can."""

    def backend_name(self) -> str:
        """Name of the encoder's attention backend, for messages."""
        return "unknown"

    def coarseness(self) -> float:
        """How many times as far as its dtype explains two runs of this encoder may
        differ by rounding alone; more than 1 where linears quantise their input."""
        return COARSENESS if rounds_input(self.model) else 1.0

    @abstractmethod
    def config(self) -> EncoderCudaGraphConfig:
        """Modalities, output width, paths and axes."""

    @abstractmethod
    def budget_range(self) -> tuple[int, int]:
        """(smallest, largest) automatic token budget."""

    @abstractmethod
    def capacity(self, key: GraphKey, limits: BatchLimits) -> GraphCapacity:
        """What a graph under `key` holds; at least ``key.token_budget`` tokens."""

    @abstractmethod
    def buffer_specs(self, shape: GraphShape) -> dict[str, BufferSpec]:
        """The tensors that ``fill`` writes and ``forward`` reads."""

    @abstractmethod
    def parse(self, mm_kwargs: dict[str, Any]) -> EncoderBatch | None:
        """Reads a batch once, without a device sync where vLLM keeps the sizes
        on the host.  None: not something graphs encode (precomputed embeddings,
        sizes that contradict each other); vLLM's own path takes the batch."""

    @abstractmethod
    def fill(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        buffers: dict[str, torch.Tensor],
        shape: GraphShape,
    ) -> None:
        """Writes the items at `indices`, in that order, and whatever padding can
        be read, into `buffers`.  The planner has made sure that they fit."""

    @abstractmethod
    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        """The captured forward: ``[capacity tokens, hidden]``; the rows of the
        items come first, in the order that ``fill`` was given."""

    @abstractmethod
    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = DEFAULT_PATH
    ) -> torch.Tensor:
        """vLLM's own forward over the items at `indices` together, without a
        collective where encoders are data parallel: ``[tokens, hidden]``, the
        same rows in the same order as ``forward`` gives for them."""

    @abstractmethod
    def sample(self, shape: GraphShape, seed: int) -> dict[str, Any] | None:
        """Keyword arguments of a batch that fits `shape` and fills most of it
        with several items of unlike sizes, for warm-up, check and measurement.
        None: the model cannot make any; its graphs are then checked on the first
        real batch that uses them."""

    def cost_sample(self, shape: GraphShape) -> dict[str, Any] | None:
        """As ``sample``, of items whose attention costs as much per token for every
        budget: times of different budgets are compared with each other, and what
        an item's own attention takes is the same in every plan."""
        return self.sample(shape, seed=0)

    fused: bool = False
    """Whether ``forward`` runs a fused forward where there is one; set before
    capture (``forward_choice.py``)."""

    def fusion_refusal(self) -> str | None:
        """Why ``fused`` must stay False; None: it may be set."""
        return f"{type(self).__name__} has no fused forward"

    def capture_buffers(
        self, shape: GraphShape, arena: BufferArena
    ) -> dict[str, torch.Tensor]:
        """The captured inputs, holding values that the forward can run on (a
        forward over meaningless tables could read out of bounds)."""
        mm_kwargs = self.sample(shape, seed=0)
        batch = None if mm_kwargs is None else self.parse(mm_kwargs)
        if batch is None:
            raise RuntimeError(
                f"{type(self).__name__} makes no sample input that it can parse"
            )
        buffers = arena.inputs(shape.key.path, self.buffer_specs(shape))
        self.fill(batch, range(len(batch.specs)), buffers, shape)
        return buffers

    def warm_up_key(self, shape: GraphShape) -> Hashable | None:
        """Graphs of equal keys need one uncaptured forward together before they are
        captured, that of the first (the largest).  None: this one needs its own,
        as is right wherever something is prepared per shape."""
        return None

    def output_rows(
        self, batch: EncoderBatch, indices: Sequence[int], path: str
    ) -> int | None:
        """Rows of a replay that belong to the items at `indices`; None: all."""
        return sum(batch.tokens_on(path, indices))

    def assemble(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        outputs: dict[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        """One embedding per item at `indices`.

        Args:
            outputs: per path, rows that nothing else writes to (a copy of a
                graph's output, or an eager result).
        """
        if len(indices) == 1:
            return [outputs[DEFAULT_PATH]]
        tokens = [batch.specs[i].output_tokens for i in indices]
        return list(outputs[DEFAULT_PATH].split_with_sizes(tokens))
