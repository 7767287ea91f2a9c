# SPDX-License-Identifier: Apache-2.0
"""The graphs of an encoder over shared buffers, and the replay of one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.buffers import BufferArena
from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    BudgetGraphMetadata,
    GraphCapacity,
    GraphKey,
)


@dataclass
class GraphSet:
    """The graphs of one manager with the storage that they share."""

    arena: BufferArena
    graphs: dict[GraphKey, BudgetGraphMetadata] = field(default_factory=dict)
    shapes: dict[GraphKey, GraphShape] = field(default_factory=dict)
    dropped: dict[GraphKey, GraphCapacity] = field(default_factory=dict)
    """Graphs that failed to capture or to pass the self-check."""
    memory_bytes: int = 0
    """Device memory taken: buffers and graph pool."""
    _stream: Any = field(default=None, init=False, repr=False)
    """Of the last replay."""

    @classmethod
    def empty(cls, device: torch.device) -> GraphSet:
        return cls(BufferArena(device))

    def drop(self, key: GraphKey) -> None:
        """Takes a graph out of use."""
        self.graphs.pop(key, None)
        self.dropped[key] = self.shapes[key].capacity

    def wait(self) -> None:
        """Until no replay is under way: memory that is given back may be taken at
        once by another stream than theirs."""
        if self._stream is not None:
            # After an error of CUDA nothing runs any more.
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()

    def drop_all(self) -> None:
        """Takes all graphs out of use and gives their buffers back."""
        self.wait()
        for key in list(self.graphs):
            self.drop(key)
            self.release_unused(key.path)
        self.memory_bytes = 0

    def leave_out(self, key: GraphKey) -> None:
        """Forgets a captured graph, and its buffers if its path has no other."""
        del self.graphs[key], self.shapes[key]
        self.release_unused(key.path)

    def release_unused(self, path: str) -> None:
        """Gives back the buffers of a path that has no graph."""
        if not any(key.path == path for key in self.graphs):
            self.arena.release(path)

    def replay(
        self,
        key: GraphKey,
        adapter: EncoderAdapter,
        batch: EncoderBatch,
        indices: Sequence[int],
    ) -> torch.Tensor:
        """Encodes the items at `indices` by one graph.

        Returns:
            ``[rows, hidden]``: a copy of the items' rows, so that the next replay
            changes nothing that was handed out.
        """
        graph = self.graphs[key]
        rows = adapter.output_rows(batch, indices, key.path)
        if rows is not None and rows > graph.output_buffer.shape[0]:
            raise ValueError(
                f"{rows} rows are more than the {graph.output_buffer.shape[0]} of the "
                f"encoder CUDA graph ({key})"
            )
        self._follow_last_replay()
        adapter.fill(batch, indices, graph.input_buffers, self.shapes[key])
        graph.graph.replay()
        return graph.output_buffer[:rows].clone()

    def _follow_last_replay(self) -> None:
        """Orders what comes behind the last replay and the copy of its output.

        A stream does so by itself; this is for callers that change streams.
        """
        device = self.arena.device
        if device.type != "cuda":
            return
        # By number: PyTorch takes three times as long with a device.
        stream = torch.cuda.current_stream(device.index)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def describe(self) -> str:
        """How many graphs there are, and for how many tokens, by path; a model's only
        one is not named."""
        budgets: dict[str, list[int]] = {}
        for key in self.graphs:
            budgets.setdefault(key.path, []).append(key.token_budget)
        return "; ".join(
            f"{'' if path == DEFAULT_PATH else f'{path}: '}{len(values)} graphs for "
            f"{min(values)} to {max(values)} tokens"
            for path, values in budgets.items()
        )

    def summary(self) -> str:
        """For the log."""
        return (
            f"{self.describe()}; {self.memory_bytes / 2**30:.2f} GiB"
            f"{f', {len(self.dropped)} dropped' if self.dropped else ''}"
        )
