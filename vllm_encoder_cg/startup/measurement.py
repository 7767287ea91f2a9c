# SPDX-License-Identifier: Apache-2.0
"""Measures, at start-up, what replays and eager forwards of this model cost here.

Both are timed as ``execute`` runs them, copies included, on the same sample
batches.  Graphs between two measured ones are interpolated (``costs.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch
from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.planning.costs import MeasuredCosts
from vllm_encoder_cg.planning.sharding import PathRate, attention_work
from vllm_encoder_cg.ranks import EncoderRanks
from vllm_encoder_cg.shapes import by_group

logger = init_logger(__name__)

Call: TypeAlias = Callable[[], torch.Tensor]

_ALL_UP_TO_TOKENS = 1024
"""Replays are short up to here and do not always grow with the budget: all graphs
are timed."""
_MOST_REPLAYS = 40
"""Or so many of them."""
_EAGER_TOKENS = (768, 1024, 1536, 2048, 4096)
"""Where both are timed, and at the smallest graph.  Near 1024 tokens an eager forward
stops waiting for its own launches and begins to grow; from there on both grow
evenly."""
_EAGER_PENALTY = 1.005
"""Where both take the same time, a graph spares the host."""
_ROUNDS = 5
_LEAST_ROUNDS = 2
_ENOUGH_MS = 15.0
"""After so many per call there are no more rounds."""


def measure_encoder(
    adapter: EncoderAdapter, graphs: GraphSet, ranks: EncoderRanks
) -> tuple[MeasuredCosts | None, dict[str, PathRate] | None]:
    """What plans are priced by, and what items are shared over ranks by; both as
    the first rank sees it, on every rank.  All ranks call it together.

    None where it cannot be measured, or, of the latter, where there is one rank.

    Raises:
        OutOfStepError: a forward of a sharded encoder failed on some ranks only.
    """
    costs, rates, error = None, None, None
    try:
        costs = measure_costs(adapter, graphs, ranks)
        if ranks.share_items:
            rates = measure_rates(adapter, graphs, ranks)
    except Exception as failure:
        error = failure
        logger.warning("Encoder costs cannot be measured", exc_info=True)
    ranks.after_forward(error)
    return ranks.from_first((costs, rates))


def measure_costs(
    adapter: EncoderAdapter, graphs: GraphSet, ranks: EncoderRanks
) -> MeasuredCosts | None:
    """Times a part of the graphs, and eager forwards, of every path.

    Where all ranks take part in forwards, they call it together.

    Returns:
        None where the model makes no sample input.
    """
    replay_ms: dict[GraphKey, float] = {}
    eager_ms: dict[str, dict[int, float]] = {}
    for group in by_group(graphs.graphs):
        last = 0, 0.0
        for key in _keys_for_eager(group):
            sample = _cost_sample(adapter, graphs, key)
            if sample is None:
                return None
            calls = [sample.replay(key), sample.eager]
            replay_ms[key], time_ms = _time_in_turn(calls, ranks)
            last = sample.tokens, time_ms * _EAGER_PENALTY
            _keep_least(eager_ms.setdefault(key.path, {}), *last)
        _time_small_replays(adapter, graphs, group, replay_ms, ranks)
        # What is larger is bound by the GPU, and takes longer by as much as a replay
        # does.
        replays = MeasuredCosts(replay_ms, {})
        largest = group[-1]
        tokens, time_ms = last
        if tokens < largest.token_budget:
            there = replace(largest, token_budget=tokens)
            more = replays.replay_cost(largest) - replays.replay_cost(there)
            _keep_least(
                eager_ms[largest.path], largest.token_budget, time_ms + max(0.0, more)
            )
    return MeasuredCosts(replay_ms, eager_ms)


def _time_small_replays(
    adapter: EncoderAdapter,
    graphs: GraphSet,
    group: Sequence[GraphKey],
    replay_ms: dict[GraphKey, float],
    ranks: EncoderRanks,
) -> None:
    """Adds the times of all small graphs of a group, which are compared with each
    other.

    So they are timed in turn, on one batch: how the attention of two batches
    compares, even of as many tokens, would hide how the graphs do.  What attention
    takes of a full graph is known of the largest of these, and in proportion.
    """
    small = [k for k in group if k.token_budget <= _ALL_UP_TO_TOKENS]
    small = _spread(small, _MOST_REPLAYS)
    sample = _cost_sample(adapter, graphs, group[0])
    if len(small) < 2 or sample is None:
        return
    times = _time_in_turn([sample.replay(key) for key in small], ranks)
    largest = small[-1]
    attention_ms = max(0.0, replay_ms[largest] - times[-1])
    for key, ms in zip(small, times, strict=True):
        replay_ms[key] = ms + attention_ms * key.token_budget / largest.token_budget


def _keep_least(times: dict[int, float], tokens: int, ms: float) -> None:
    times[tokens] = min(ms, times.get(tokens, ms))


def measure_rates(
    adapter: EncoderAdapter, graphs: GraphSet, ranks: EncoderRanks
) -> dict[str, PathRate] | None:
    """What a token, and attention between rows, take on every path.

    One graph per path is replayed full, and with one small item alone: the rows
    that it computes are as many, the rows that attend to each other are not.

    Returns:
        None where a path has no graph, or the model makes no sample input.
    """
    rates: dict[str, PathRate] = {}
    for path in adapter.config().paths:
        keys = [key for key in graphs.graphs if key.path == path]
        below = [k for k in keys if k.token_budget <= _EAGER_TOKENS[-1]]
        key = max(below or keys, key=lambda key: key.token_budget, default=None)
        mm_kwargs = None if key is None else adapter.sample(graphs.shapes[key], seed=0)
        batch = None if mm_kwargs is None else adapter.parse(mm_kwargs)
        if key is None or batch is None:
            return None
        items = batch.items_on(path)
        work = [attention_work(batch.specs[i]) for i in items]
        full_ms = _time(_replay_call(adapter, graphs, key, batch, items), ranks)
        attention_ms = 0.0
        if sum(work) > min(work):
            least = items[work.index(min(work))]
            one_ms = _time(_replay_call(adapter, graphs, key, batch, [least]), ranks)
            attention_ms = max(0.0, (full_ms - one_ms) / (sum(work) - min(work)))
        rest_ms = max(0.0, full_ms - attention_ms * sum(work))
        rates[path] = PathRate(rest_ms / key.token_budget, attention_ms)
    return rates


def _keys_for_eager(group: Sequence[GraphKey]) -> list[GraphKey]:
    """The smallest graph, and the largest below each of some sizes."""
    chosen = {group[0]}
    for tokens in _EAGER_TOKENS:
        chosen.add([k for k in group if k.token_budget <= tokens or k == group[0]][-1])
    return sorted(chosen, key=lambda key: key.token_budget)


def _spread(keys: Sequence[GraphKey], count: int) -> list[GraphKey]:
    """At most `count` of `keys`, evenly spread, both ends included."""
    if len(keys) <= count:
        return list(keys)
    step = (len(keys) - 1) / (count - 1)
    return [keys[round(i * step)] for i in range(count)]


@dataclass(frozen=True)
class _CostSample:
    """One batch, by graph and eagerly."""

    tokens: int
    replay: Callable[[GraphKey], Call]
    """Takes a graph that holds the batch."""
    eager: Call


def _cost_sample(
    adapter: EncoderAdapter, graphs: GraphSet, key: GraphKey
) -> _CostSample | None:
    mm_kwargs = adapter.cost_sample(graphs.shapes[key])
    batch = None if mm_kwargs is None else adapter.parse(mm_kwargs)
    if batch is None:
        return None
    indices = batch.items_on(key.path)
    return _CostSample(
        sum(batch.tokens_on(key.path, indices)),
        lambda by: _replay_call(adapter, graphs, by, batch, indices),
        lambda: adapter.eager(batch, indices, key.path),
    )


def _replay_call(
    adapter: EncoderAdapter,
    graphs: GraphSet,
    key: GraphKey,
    batch: EncoderBatch,
    indices: Sequence[int],
) -> Call:
    return lambda: graphs.replay(key, adapter, batch, indices)


def _time(call: Call, ranks: EncoderRanks) -> float:
    """Milliseconds of a call."""
    (time_ms,) = _time_in_turn([call], ranks)
    return time_ms


def _time_in_turn(calls: Sequence[Call], ranks: EncoderRanks) -> list[float]:
    """Milliseconds of synchronised calls: the least of a few rounds, since whatever
    disturbs one adds to it, and the first round warms up."""
    times: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode():
        for round_ in range(1, _ROUNDS + 1):
            for call, of_call in zip(calls, times, strict=True):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                call()
                torch.cuda.synchronize()
                of_call.append((time.perf_counter() - begin) * 1e3)
            enough = sum(map(sum, times)) > _ENOUGH_MS * len(calls)
            if round_ >= _LEAST_ROUNDS and ranks.in_step(enough):
                break
    return list(map(min, times))
