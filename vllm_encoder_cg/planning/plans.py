# SPDX-License-Identifier: Apache-2.0
"""A plan is data: what happens to every item of a batch, before it happens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from vllm_encoder_cg.definitions import EagerReason, EncoderItemSpec, GraphKey

_NO_REASONS: Mapping[int, EagerReason] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PathStep:
    """How one path of a sub-batch is encoded: by a graph or eagerly."""

    key: GraphKey | None
    """The graph to replay; None: eager."""
    eager: EagerReason | None
    """Why without a graph; None: by graph."""
    tokens: int
    """Output tokens of the items, padding not included."""


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Items that are encoded together."""

    indices: tuple[int, ...]
    """Positions in the batch, ascending."""
    steps: Mapping[str, PathStep]
    """Per path; a path on which the items have nothing is absent."""
    eager_reasons: Mapping[int, EagerReason] = field(
        default_factory=lambda: _NO_REASONS
    )
    """Per index, why a path of that item runs eagerly; an item whose every path
    is replayed is absent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every item of a batch in exactly one sub-batch."""

    sub_batches: tuple[SubBatch, ...]


def without_graphs(
    sub_batch: SubBatch,
    specs: Sequence[EncoderItemSpec],
    reason: EagerReason,
    kept: Collection[GraphKey] = (),
) -> SubBatch:
    """`sub_batch` with all graphs but `kept` replaced by eager calls; itself where
    it has no others.

    Args:
        specs: of the batch.
    """
    lost = {
        path
        for path, step in sub_batch.steps.items()
        if step.key is not None and step.key not in kept
    }
    if not lost:
        return sub_batch
    steps = {
        path: PathStep(None, reason, step.tokens) if path in lost else step
        for path, step in sub_batch.steps.items()
    }
    reasons = {
        i: reason
        for i in sub_batch.indices
        if any(specs[i].get_path_output_tokens(path) for path in lost)
    }
    return SubBatch(sub_batch.indices, steps, reasons | dict(sub_batch.eager_reasons))
