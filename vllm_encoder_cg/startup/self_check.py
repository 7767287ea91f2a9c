# SPDX-License-Identifier: Apache-2.0
"""Replays are compared with eager before graphs serve; one that differs never does.

Shapes, tables and masks whose layout depends on a count go wrong silently: the
output has the right shape and wrong values.  So a sample of the graphs
(``keys_to_check``) encodes several items of unlike sizes each and is compared with
the model's own forward, item by item.  Graphs that there is no sample input for are
compared at their first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.planning.plans import SubBatch
from vllm_encoder_cg.ranks import EncoderRanks
from vllm_encoder_cg.shapes import by_group
from vllm_encoder_cg.startup.rounding import allowed_error, nudge, relative_norm

logger = init_logger(__name__)

SELF_CHECK_TOLERANCE: dict[torch.dtype, float] = {
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""Largest relative norm of the difference, per item.  About three times what
rounding alone gives on a 30-layer tower; a wrong table gives 0.1 to 1.  Beyond it
a graph never serves; in float32 and bfloat16 ``verification.VERIFY_TOLERANCE``, beyond
which a case is only reported, is narrower."""

MOST_APART = 32
"""Of the graphs of a ladder, one of so many is compared at least."""

_ALONE_UP_TO_TOKENS = 4096
"""In larger graphs, whose forward takes as long as that of many small ones, no item is
encoded alone."""


@dataclass(frozen=True)
class Mismatch:
    """A graph that differs from eager."""

    key: GraphKey
    error: float
    """Largest relative norm over the items; inf where a value is not finite."""
    tolerance: float


class NoSampleInputError(Exception):
    """The adapter cannot make sample input."""


def check_graphs(
    adapter: EncoderAdapter, graphs: GraphSet, ranks: EncoderRanks
) -> list[Mismatch]:
    """Compares a part of `graphs` with eager; all ranks call it together.

    Where one differs, so may others that were captured alike: all of its group are
    compared then.  A check that raises counts as a difference.

    Returns:
        Those of this rank; where all ranks take part in forwards, of any.

    Raises:
        NoSampleInputError: there is nothing to compare on.
        OutOfStepError: a check of a sharded encoder failed on some ranks only.
    """
    keys = keys_to_check(list(graphs.graphs))
    mismatches = _mismatches(adapter, graphs, keys, ranks)
    groups = {key.group for key in mismatches}
    rest = [k for k in graphs.graphs if k.group in groups and k not in keys]
    mismatches |= _mismatches(adapter, graphs, rest, ranks)
    return list(mismatches.values())


def _mismatches(
    adapter: EncoderAdapter,
    graphs: GraphSet,
    keys: Sequence[GraphKey],
    ranks: EncoderRanks,
) -> dict[GraphKey, Mismatch]:
    """Of some graphs, those that differ by more than rounding explains."""
    mismatches: dict[GraphKey, Mismatch] = {}
    smallest = {group[0] for group in by_group(graphs.graphs)}
    for key in keys:
        error = None
        try:
            mismatch = check_graph(
                adapter,
                graphs.shapes[key],
                lambda batch, indices, key=key: graphs.replay(  # type: ignore[misc]
                    key, adapter, batch, indices
                ),
                seed=key.token_budget,
                alone=key.token_budget <= _ALONE_UP_TO_TOKENS or key in smallest,
            )
        except NoSampleInputError:
            raise
        except Exception as failure:
            logger.warning(
                "Encoder CUDA graph (%s) cannot be checked", key, exc_info=True
            )
            mismatch, error = Mismatch(key, float("inf"), 0.0), failure
        if mismatch is not None:
            mismatches[key] = mismatch
        ranks.after_forward(error)
    mismatches = _on_any_rank(mismatches, ranks)
    if mismatches:
        allowed = _explained_error(adapter, graphs, list(mismatches), ranks)
        mismatches = {
            key: replace(each, tolerance=allowed[key.path])
            for key, each in mismatches.items()
            if each.error > allowed[key.path]
        }
        mismatches = _on_any_rank(mismatches, ranks)
    return mismatches


def _on_any_rank(
    mismatches: dict[GraphKey, Mismatch], ranks: EncoderRanks
) -> dict[GraphKey, Mismatch]:
    """Where all ranks take part in forwards: dropped on one, dropped on all."""
    if ranks.share_forwards:
        for others in ranks.everyone(mismatches):
            mismatches = others | mismatches
    return mismatches


def _explained_error(
    adapter: EncoderAdapter,
    graphs: GraphSet,
    keys: Sequence[GraphKey],
    ranks: EncoderRanks,
) -> dict[str, float]:
    """By path, the error that rounding explains (``rounding.py``): measured on the
    sample of the smallest of `keys`, only when some graph differs."""
    allowed = {}
    for path in sorted({key.path for key in keys}):
        key = min((k for k in keys if k.path == path), key=lambda k: k.token_budget)
        error, allowed[path] = None, 0.0
        try:
            embeddings = []
            mm_kwargs = adapter.sample(graphs.shapes[key], key.token_budget) or {}
            for given in (
                mm_kwargs,
                nudge(mm_kwargs, graphs.graphs[key].output_buffer.dtype),
            ):
                batch = adapter.parse(given)
                assert batch is not None
                indices = batch.items_on(path)
                with torch.inference_mode():
                    rows = adapter.eager(batch, indices, path)
                embeddings.append(rows.split(batch.tokens_on(path, indices)))
            references, moved = embeddings
            tolerance = self_check_tolerance(adapter, references[0].dtype)
            allowed[path] = allowed_error(tolerance, moved, references)
        except Exception as failure:
            error = failure
        ranks.after_forward(error)
    return allowed


def check_graph(
    adapter: EncoderAdapter,
    shape: GraphShape,
    replay: Callable[[EncoderBatch, Sequence[int]], torch.Tensor],
    seed: int,
    alone: bool = True,
) -> Mismatch | None:
    """Compares one graph with eager on a sample batch.

    Args:
        replay: encodes the items at the given indices of a batch by this graph;
            rows in that order.
        alone: whether to compare one item alone as well, beside which nearly all of
            the graph is padding.

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
    key = shape.key
    # Last item first: an order other than the batch's is what packing produces.
    indices = batch.items_on(key.path)[::-1]
    tokens = batch.tokens_on(key.path, indices)
    with torch.inference_mode():
        result = replay(batch, indices)
        reference = adapter.eager(batch, indices, key.path)
        found = _compare(adapter, key, result, reference, tokens)
        if alone:
            # Behind eager, which may have overwritten what the graph reads; and
            # whatever came of the first, as other ranks may see it differently.
            result = replay(batch, indices[:1])
            reference = reference[: tokens[0]]
            found = found or _compare(adapter, key, result, reference, tokens[:1])
    return found


def _compare(
    adapter: EncoderAdapter,
    key: GraphKey,
    result: torch.Tensor,
    reference: torch.Tensor,
    tokens: Sequence[int],
) -> Mismatch | None:
    """Compares the rows of items, ``[sum(tokens), hidden]`` both."""
    if sum(tokens) != reference.shape[0] or result.shape != reference.shape:
        tolerance = self_check_tolerance(adapter, reference.dtype)
        return Mismatch(key, float("inf"), tolerance)
    return compare_items(adapter, key, result.split(tokens), reference.split(tokens))


def compare_items(
    adapter: EncoderAdapter,
    key: GraphKey,
    results: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> Mismatch | None:
    """Compares items one by one, so that a small one cannot hide among large."""
    errors = [relative_norm(a, b) for a, b in zip(results, references, strict=True)]
    dtype, error = references[0].dtype, max(errors)
    # Whether a tower is quantised is asked of all its modules: only where it matters.
    if error <= _tolerance(dtype):
        return None
    tolerance = self_check_tolerance(adapter, dtype)
    return None if error <= tolerance else Mismatch(key, error, tolerance)


def self_check_tolerance(adapter: EncoderAdapter, dtype: torch.dtype) -> float:
    """For embeddings of a dtype; wider for quantised towers."""
    return _tolerance(dtype) * adapter.coarseness()


def _tolerance(dtype: torch.dtype) -> float:
    return SELF_CHECK_TOLERANCE.get(dtype, 1e-2)


def keys_to_check(keys: Sequence[GraphKey]) -> list[GraphKey]:
    """A sample of graphs that covers each group: both ends of its ladder, and at least
    one between them, evenly spread."""
    chosen: list[GraphKey] = []
    for group in by_group(keys):
        last = len(group) - 1
        steps = 2 + last // MOST_APART
        chosen.extend(
            group[i] for i in sorted({last * k // steps for k in range(steps + 1)})
        )
    return chosen


class SelfCheck:
    """Keeps graphs that differ from eager out of a manager's use.

    Args:
        raise_on_mismatch: whether one that differs after capture stops the start.
    """

    def __init__(
        self, adapter: EncoderAdapter, ranks: EncoderRanks, raise_on_mismatch: bool
    ) -> None:
        self._adapter = adapter
        self._ranks = ranks
        self._raise = raise_on_mismatch
        self._unchecked: set[GraphKey] = set()

    def after_capture(self, graphs: GraphSet) -> None:
        """Drops those of `graphs` that differ.  What there is no sample input for
        is left to ``on_use``.

        Raises:
            RuntimeError: a graph differs, on any rank, and that is to stop the
                start.
        """
        self._unchecked = set()
        try:
            mismatches = check_graphs(self._adapter, graphs, self._ranks)
        except NoSampleInputError:
            self._unchecked = set(graphs.graphs)
            return
        if self._raise:
            for mismatch in chain(*self._ranks.everyone(mismatches)):
                raise RuntimeError(
                    f"{self._describe(mismatch)}; "
                    'additional_config.encoder_cg.on_mismatch is "raise"'
                )
        for mismatch in mismatches:
            self._drop(graphs, [mismatch.key], mismatch)

    def on_use(
        self,
        graphs: GraphSet,
        batch: EncoderBatch,
        sub_batch: SubBatch,
        embeddings: list[torch.Tensor],
    ) -> list[torch.Tensor] | None:
        """Compares graphs at their first use with eager, where they could not be
        checked before.

        Args:
            embeddings: what the graphs made of the items of `sub_batch`.

        Returns:
            None: nothing speaks against these embeddings; else what to hand out
            instead, and graphs that differ are dropped.
        """
        if not self._unchecked:
            return None
        keys = [step.key for step in sub_batch.steps.values() if step.key is not None]
        if self._unchecked.isdisjoint(keys):
            return None
        eager = self._adapter.assemble(
            batch,
            sub_batch.indices,
            {
                path: self._adapter.eager(batch, sub_batch.indices, path)
                for path in sub_batch.steps
            },
        )
        # Input that eager itself makes nothing finite of proves nothing.
        comparable = all(bool(each.isfinite().all()) for each in eager)
        mismatch = (
            compare_items(self._adapter, keys[0], embeddings, eager)
            if comparable
            else None
        )
        if self._ranks.share_forwards:
            found = self._ranks.everyone(mismatch)
            mismatch = next((each for each in found if each is not None), None)
            comparable = self._ranks.all(comparable)
        if comparable or mismatch is not None:
            self._unchecked.difference_update(keys)
        if mismatch is None:
            return None if comparable else eager
        self._drop(graphs, keys, mismatch)
        return eager

    def _drop(
        self, graphs: GraphSet, keys: Iterable[GraphKey], mismatch: Mismatch
    ) -> None:
        logger.error(
            "%s; the graph is dropped and what it would have held runs eagerly. "
            'Set additional_config.encoder_cg.on_mismatch to "raise" to stop the '
            "start instead",
            self._describe(mismatch),
        )
        for key in keys:
            graphs.drop(key)

    def _describe(self, mismatch: Mismatch) -> str:
        return (
            f"Encoder CUDA graph ({mismatch.key}) of "
            f"{type(self._adapter.model).__name__} differs from eager by "
            f"{mismatch.error:.2e} (relative norm; allowed: {mismatch.tolerance:.0e}; "
            f"attention backend: {self._adapter.backend_name()})"
        )
