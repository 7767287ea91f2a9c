# SPDX-License-Identifier: Apache-2.0
"""A graph serves only after its replay equalled eager on sample input.

Shapes, tables and masks whose layout depends on a count go wrong silently: the
output has the right shape and wrong values.  So each graph that is checked
encodes several items of unlike sizes and is compared with the model's own
forward, item by item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import GraphKey

RELATIVE_TOLERANCE: dict[torch.dtype, float] = {
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""Largest relative norm of the difference, per item.  About three times what
rounding alone gives on a 30-layer tower; a wrong table gives 0.1 to 1."""


@dataclass(frozen=True)
class Mismatch:
    """A graph that differs from eager."""

    key: GraphKey
    error: float
    """Largest relative norm over the items; inf where a value is not finite."""
    tolerance: float


class NoSampleInputError(Exception):
    """The adapter cannot make sample input."""


def relative_norm(result: torch.Tensor, reference: torch.Tensor) -> float:
    """``|result - reference| / |reference|``, in float32.

    inf where shapes differ or a value of `result` is not finite.  Reads the
    device.
    """
    if result.shape != reference.shape:
        return float("inf")
    reference = reference.float()
    error = (result.float() - reference).norm() / reference.norm().clamp(min=1e-30)
    value = float(error)
    return value if value == value else float("inf")


def check_graph(
    adapter: EncoderAdapter,
    shape: GraphShape,
    replay: Callable[[EncoderBatch, Sequence[int]], torch.Tensor],
    seed: int,
) -> Mismatch | None:
    """Compares one graph with eager on a sample batch.

    Args:
        replay: encodes the items at the given indices of a batch by this graph;
            rows in that order.

    Raises:
        NoSampleInputError: there is nothing to compare on.
    """
    mm_kwargs = adapter.sample(shape, seed)
    if mm_kwargs is None:
        raise NoSampleInputError
    batch = adapter.parse(mm_kwargs)
    if batch is None:
        raise RuntimeError(
            f"{type(adapter).__name__} does not parse its own sample input for "
            f"{shape.key}"
        )
    path = shape.key.path
    # Last item first: an order other than the batch's is what packing produces.
    indices = [
        i
        for i in reversed(range(len(batch.specs)))
        if batch.specs[i].get_path_output_tokens(path)
    ]
    with torch.inference_mode():
        result = replay(batch, indices)
        reference = adapter.eager(batch, indices, path)
    tokens = [batch.specs[i].get_path_output_tokens(path) for i in indices]
    if sum(tokens) != reference.shape[0] or result.shape != reference.shape:
        return Mismatch(shape.key, float("inf"), _tolerance(reference.dtype))
    return compare_items(shape.key, result.split(tokens), reference.split(tokens))


def compare_items(
    key: GraphKey, results: Sequence[torch.Tensor], references: Sequence[torch.Tensor]
) -> Mismatch | None:
    """Compares items one by one, so that a small one cannot hide among large."""
    errors = [relative_norm(a, b) for a, b in zip(results, references, strict=True)]
    tolerance = _tolerance(references[0].dtype)
    error = max(errors)
    return None if error <= tolerance else Mismatch(key, error, tolerance)


def _tolerance(dtype: torch.dtype) -> float:
    return RELATIVE_TOLERANCE.get(dtype, 1e-2)


def keys_to_check(keys: Sequence[GraphKey], every: int = 8) -> list[GraphKey]:
    """A sample of graphs that covers each path and axis, both ends of the
    ladder, and every `every`-th budget between them."""
    groups: dict[tuple, list[GraphKey]] = {}
    for key in keys:
        groups.setdefault((key.path, key.axis_keys), []).append(key)
    chosen: list[GraphKey] = []
    for group in groups.values():
        ordered = sorted(group, key=lambda key: key.token_budget)
        picked = {0, len(ordered) - 1, *range(0, len(ordered), every)}
        chosen.extend(ordered[i] for i in sorted(picked))
    return chosen
