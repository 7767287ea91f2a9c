# SPDX-License-Identifier: Apache-2.0
"""The exchange that ends a batch where encoders are data parallel.

Every rank has encoded its share of the items; afterwards each has the
embeddings of all of them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from vllm_encoder_cg.definitions import EncoderItemSpec
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.planning.sharding import Assignment
from vllm_encoder_cg.ranks import EncoderRanks

logger = init_logger(__name__)

_TRIAL_ROWS = 1024
"""Rows per rank with which the two kinds of gather are timed."""


class EmbeddingGather:
    """Gathers rows over the tensor-parallel group.

    An uneven gather (``all_gatherv``) moves the rows that there are; an even one
    (``all_gather``) moves, for every rank, as many as the fullest has, but faster
    per row.  Which moves a batch sooner is decided by their measured times, the
    same on every rank.

    Args:
        ranks: of more than one rank.
        width: elements of a row.
        dtype: of the rows; other types are cast.
    """

    def __init__(
        self, ranks: EncoderRanks, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ranks = ranks
        self._width = width
        self._dtype = dtype
        self.device = device
        self.uneven_cost = math.inf
        """Time of an uneven gather over that of an even one of as many rows; inf:
        there is no uneven one."""

    def measure(self) -> None:
        """Times both kinds of gather.  All ranks call it together."""
        # One row more on the first rank: vLLM takes equal numbers to be even.
        counts = [_TRIAL_ROWS + 1, *[_TRIAL_ROWS] * (self._ranks.size - 1)]
        rows = torch.zeros(
            (counts[self._ranks.rank], self._width),
            dtype=self._dtype,
            device=self.device,
        )
        group = self._ranks.group
        try:
            group.all_gatherv(rows, dim=0, sizes=counts)
        except (NotImplementedError, AssertionError) as error:
            # The group's backend says so before it sends anything.
            logger.debug("No uneven gather: %s", error)
            return
        uneven = _time(lambda: group.all_gatherv(rows, dim=0, sizes=counts))
        even = _time(lambda: group.all_gather(rows[:_TRIAL_ROWS], dim=0))
        self.uneven_cost = self._ranks.from_first(uneven / even)

    def is_uneven(self, counts: Sequence[int]) -> bool:
        """Whether to move `counts` rows per rank by an uneven gather."""
        return self.uneven_cost * sum(counts) < max(counts) * len(counts)

    def pack(
        self,
        outputs: Sequence[torch.Tensor],
        specs: Sequence[EncoderItemSpec],
        assignment: Assignment,
    ) -> torch.Tensor:
        """What this rank puts into the gather: its items' rows, and behind them
        what makes an even one even.

        That there is memory for what comes out of the gather is seen here, while the
        ranks may still decide to do something else.

        Args:
            outputs: one per item of this rank.
            specs: of the batch.

        Raises:
            ValueError: an embedding has another shape than its item's spec says.
        """
        items = assignment.items[self._ranks.rank]
        for i, output in zip(items, outputs, strict=True):
            expected = (specs[i].output_tokens, self._width)
            if tuple(output.shape) != expected:
                raise ValueError(
                    f"item {i} has an embedding of shape {tuple(output.shape)} "
                    f"instead of {expected}"
                )
        counts = assignment.tokens
        own = counts[self._ranks.rank]
        if self.is_uneven(counts):
            length, gathered = own, sum(counts)
        else:
            length, gathered = max(counts), max(counts) * len(counts)
        rows = self._empty(length)
        # The allocator keeps it for the gather.
        self._empty(gathered)
        if own:
            parts = rows[:own].split([specs[i].output_tokens for i in items])
            for part, output in zip(parts, outputs, strict=True):
                part.copy_(output)
        return rows

    def _empty(self, rows: int) -> torch.Tensor:
        size = (rows, self._width)
        return torch.empty(size, dtype=self._dtype, device=self.device)

    def gather(
        self,
        rows: torch.Tensor,
        specs: Sequence[EncoderItemSpec],
        assignment: Assignment,
    ) -> list[torch.Tensor]:
        """The embeddings of the whole batch in its order, views of one tensor
        that nothing else writes to.  All ranks call it together.

        Args:
            rows: from ``pack``.
        """
        counts = list(assignment.tokens)
        group = self._ranks.group
        if not sum(counts):
            gathered = rows
            stride = 0
        elif self.is_uneven(counts):
            gathered = group.all_gatherv(rows, dim=0, sizes=counts)
            stride = 0
        else:
            gathered = group.all_gather(rows, dim=0)
            stride = max(counts)
        embeddings: list[torch.Tensor] = [gathered] * len(specs)
        begin = 0
        for rank, items in enumerate(assignment.items):
            begin = rank * stride if stride else begin
            for i in items:
                end = begin + specs[i].output_tokens
                embeddings[i] = gathered[begin:end]
                begin = end
        return embeddings


def _time(call: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of a call that all ranks make together."""
    times = []
    for _ in range(repeats):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        call()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
