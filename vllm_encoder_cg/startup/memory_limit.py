# SPDX-License-Identifier: Apache-2.0
"""Which graphs are left out so that all take no more than ``memory_limit_gib``."""

from __future__ import annotations

from vllm_encoder_cg.definitions import AxisKeys, GraphKey
from vllm_encoder_cg.logger import init_logger

logger = init_logger(__name__)

_MOST_CORRECTIONS = 3
"""Captures from the beginning; what the limit is then exceeded by is little."""

_TOLERATED = 1.02


class MemoryLimit:
    """Which budgets to capture so that a limit holds.

    Graphs of a pool use one memory in turn, so that all of them take little more than
    the largest forward takes at its highest.  The first graph of a group is
    its largest: its forward is measured before it is captured, and one that takes too
    much says by how much the next one has to be smaller.

    A capture takes more than the measured forward: tensors of many sizes leave gaps,
    what other streams use is not used again, and the driver has its part.  By how
    much, the first capture tells.  Those of a second path or axis do not fit into the
    gaps of the first as well as their own (two paths of one size took a half more
    than either), so that each is looked at.  A graph that is left out keeps its
    memory as long as the pool has another: then all are captured anew.
    """

    def __init__(self, limit_bytes: float | None) -> None:
        self._limit = limit_bytes
        self._largest: dict[str, int] = {}
        self._measured: set[tuple[str, AxisKeys]] = set()
        self._highest = 0
        """Of all forwards that are to be captured."""
        self._excess = 1.0
        """By how much a capture takes more than its forward."""
        self._expected = 0.0
        self._own: dict[tuple[str, AxisKeys], int] = {}
        """Per group, bytes of the buffers that its graphs do not share."""
        self._later = 0
        """Of these, what graphs smaller than the last measured one will take."""
        self._corrections = 0

    def begin(self) -> None:
        """All graphs are captured, or captured anew: what is to be smaller is known."""
        self._measured.clear()
        self._own.clear()
        self._highest = 0

    def admits(self, key: GraphKey) -> bool:
        """Whether a graph is not above what was found to be the most of its path."""
        return key.token_budget <= self._largest.get(key.path, key.token_budget)

    def is_to_measure(self, key: GraphKey) -> bool:
        """Whether it is the first of its group, and there is a limit."""
        return self._limit is not None and key.group not in self._measured

    def holds(
        self,
        key: GraphKey,
        shared_bytes: int,
        own_bytes: int,
        later_bytes: int,
        forward_bytes: int,
    ) -> bool:
        """Whether a graph may be captured.

        Args:
            shared_bytes: of inputs and outputs that graphs share, so far, this graph's
                included.
            own_bytes: of inputs that this graph has for itself.
            later_bytes: of those that the smaller ones of its group will have.
            forward_bytes: what its forward takes at its highest beyond them.
        """
        assert self._limit is not None
        own = sum(self._own.values()) + own_bytes + later_bytes
        expected = shared_bytes + own + max(self._highest, forward_bytes)
        if expected * self._excess <= self._limit:
            self._measured.add(key.group)
            self._own[key.group] = own_bytes + later_bytes
            self._later = later_bytes
            self._highest = max(self._highest, forward_bytes)
            self._expected = expected
            return True
        self._lower(key, expected * self._excess)
        return False

    def held(self, key: GraphKey, taken_bytes: int, *, alone: bool) -> bool:
        """Whether a graph that was measured, and is captured, may stay.

        Args:
            taken_bytes: by all graphs so far, as the device has it.
            alone: whether it is the only one.  If it is not, and may not stay, all
                have to be captured anew.
        """
        assert self._limit is not None
        taken_bytes += self._later
        if alone:
            self._excess = max(self._excess, taken_bytes / max(self._expected, 1.0))
        elif self._corrections >= _MOST_CORRECTIONS:
            return True
        if taken_bytes <= self._limit:
            return True
        self._corrections += not alone
        self._measured.discard(key.group)
        del self._own[key.group]
        self._highest = 0
        self._lower(key, taken_bytes)
        return False

    def report(self, taken_bytes: int) -> None:
        """Warns where all graphs take more than the limit by more than what the driver
        gives and takes by itself."""
        if self._limit is not None and taken_bytes > _TOLERATED * self._limit:
            logger.warning(
                "Encoder CUDA graphs take %.2f GiB, above "
                "additional_config.encoder_cg.memory_limit_gib of %.2f",
                taken_bytes / 2**30,
                self._limit / 2**30,
            )

    def _lower(self, key: GraphKey, taken: float) -> None:
        assert self._limit is not None
        budget = key.token_budget
        self._largest[key.path] = min(budget - 1, int(budget * self._limit / taken))
        logger.info(
            "Encoder CUDA graph (%s) would take graph memory to %.2f GiB, above "
            "additional_config.encoder_cg.memory_limit_gib of %.2f; it and those above "
            "%d tokens are left out, and larger items run eagerly",
            key,
            taken / 2**30,
            self._limit / 2**30,
            self._largest[key.path],
        )
