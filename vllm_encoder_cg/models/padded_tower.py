# SPDX-License-Identifier: Apache-2.0
"""Towers that take an image, a slice or a frame as one padded row of patches.

A row never looks at another one, so unused rows are harmless whatever they
hold; within a row, a mask keeps padding from the real patches.  The length of a
row is a capture axis: items that need another length than those captured are
encoded eagerly.  Shared here: lengths, capacities in whole rows, refusals.  An
architecture's adapter says how rows are filled, encoded and checked.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    BatchLimits,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.models.host_tables import HostTables
from vllm_encoder_cg.models.tower import TowerAdapter

_MAX_PATCHES = 73728
"""Patches of the largest automatic graph.  An encoder keeps a GPU busy long
before, and its intermediate tensors take memory in proportion."""


class PaddedTowerAdapter(TowerAdapter):
    """Base of the padded towers' adapters."""

    axis_name: ClassVar[str]
    """What the lengths of rows are counted in, for messages."""
    buffer_keys: ClassVar[tuple[str, ...]]

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self.host_tables = HostTables()

    # -- What differs between towers ----------------------------------------

    @property
    @abstractmethod
    def modalities(self) -> tuple[str, ...]:
        """Those of the model that have rows."""

    @property
    @abstractmethod
    def out_hidden_size(self) -> int:
        """Width of an output row."""

    @abstractmethod
    def row_lengths(self) -> tuple[int, ...]:
        """Axis keys with graphs, the longest first."""

    @abstractmethod
    def row_patches(self, length: int) -> int:
        """Patches of a row of `length`."""

    @abstractmethod
    def row_tokens(self, length: int) -> int:
        """Most output tokens of a row of `length`."""

    # -- EncoderAdapter ------------------------------------------------------

    def config(self) -> EncoderCudaGraphConfig:
        shortest = min(map(self.row_tokens, self.row_lengths()))
        return EncoderCudaGraphConfig(
            modalities=list(self.modalities),
            buffer_keys=list(self.buffer_keys),
            out_hidden_size=self.out_hidden_size,
            paths={
                DEFAULT_PATH: EncoderCudaGraphPathConfig(token_granularity=shortest)
            },
            capture_axes=(self.row_lengths(),),
            axis_names=(self.axis_name,),
        )

    def budget_range(self) -> tuple[int, int]:
        lengths = self.row_lengths()
        largest = min(
            self.most_tokens,
            max(
                _MAX_PATCHES // self.row_patches(length) * self.row_tokens(length)
                for length in lengths
            ),
        )
        return min(*map(self.row_tokens, lengths), largest), largest

    def capacity(self, key: GraphKey, limits: BatchLimits) -> GraphCapacity:
        # Rounded up to whole rows.  A row may hold fewer tokens than it has room
        # for, so rows are counted beside tokens.
        tokens = self.row_tokens(self.length(key))
        rows = -(-key.token_budget // tokens)
        return GraphCapacity(
            tokens=rows * tokens, items=limits.max_items, extra={"rows": rows}
        )

    @staticmethod
    def length(key: GraphKey) -> int:
        """The length of a graph's rows."""
        (length,) = key.axis_keys
        if not isinstance(length, int):
            raise TypeError(f"axis key {length!r} of {key} is no length of rows")
        return length
