# SPDX-License-Identifier: Apache-2.0
"""Measures, at start-up, what replays and eager forwards of this model cost here.

Both are timed as ``execute`` runs them, copies included, on the same sample
batches.  Graphs between two measured ones are interpolated (``costs.py``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch
from vllm_encoder_cg.capture import GraphSet
from vllm_encoder_cg.costs import MeasuredCosts
from vllm_encoder_cg.definitions import AxisKeys, EncoderItemSpec, GraphKey
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.ranks import EncoderRanks
from vllm_encoder_cg.sharding import PathRate, attention_work

logger = init_logger(__name__)

_REPLAYS_PER_PATH = 20
_EAGER_POINTS = 5
_EAGER_PENALTY = 1.01
"""Where both take the same time, a graph spares the host."""
_LARGEST_EAGER_TOKENS = 4096
"""Beyond it an eager forward is bound by the GPU, so its time goes on as it does
up to here."""


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
    for group in _by_path_and_axis(list(graphs.graphs)).values():
        for key in _spread(group, _REPLAYS_PER_PATH):
            time_ms = _time_replay(adapter, graphs, key, ranks)
            if time_ms is None:
                return None
            replay_ms[key] = time_ms
        below = [k for k in group if k.token_budget <= _LARGEST_EAGER_TOKENS]
        for key in _spread(below or group[:1], _EAGER_POINTS):
            tokens, time_ms = _time_eager(adapter, graphs, key, ranks)
            time_ms *= _EAGER_PENALTY
            known = eager_ms.setdefault(key.path, {})
            known[tokens] = min(time_ms, known.get(tokens, time_ms))
    return MeasuredCosts(replay_ms, eager_ms)


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
        below = [k for k in keys if k.token_budget <= _LARGEST_EAGER_TOKENS]
        key = max(below or keys, key=lambda key: key.token_budget, default=None)
        mm_kwargs = None if key is None else adapter.sample(graphs.shapes[key], seed=0)
        batch = None if mm_kwargs is None else adapter.parse(mm_kwargs)
        if key is None or batch is None:
            return None
        items = _items_on_path(batch.specs, path)
        work = [attention_work(batch.specs[i]) for i in items]
        full_ms = _time_items(adapter, graphs, key, batch, items, ranks)
        attention_ms = 0.0
        if sum(work) > min(work):
            least = items[work.index(min(work))]
            one_ms = _time_items(adapter, graphs, key, batch, [least], ranks)
            attention_ms = max(0.0, (full_ms - one_ms) / (sum(work) - min(work)))
        rest_ms = max(0.0, full_ms - attention_ms * sum(work))
        rates[path] = PathRate(rest_ms / key.token_budget, attention_ms)
    return rates


def _by_path_and_axis(
    keys: Sequence[GraphKey],
) -> dict[tuple[str, AxisKeys], list[GraphKey]]:
    groups: dict[tuple[str, AxisKeys], list[GraphKey]] = {}
    for key in sorted(keys, key=lambda key: key.token_budget):
        groups.setdefault((key.path, key.axis_keys), []).append(key)
    return groups


def _spread(keys: Sequence[GraphKey], count: int) -> list[GraphKey]:
    """At most `count` of `keys`, evenly spread, both ends included."""
    if len(keys) <= count:
        return list(keys)
    step = (len(keys) - 1) / (count - 1)
    return [keys[round(i * step)] for i in range(count)]


def _time_replay(
    adapter: EncoderAdapter, graphs: GraphSet, key: GraphKey, ranks: EncoderRanks
) -> float | None:
    mm_kwargs = adapter.cost_sample(graphs.shapes[key])
    batch = None if mm_kwargs is None else adapter.parse(mm_kwargs)
    if batch is None:
        return None
    indices = _items_on_path(batch.specs, key.path)
    return _time_items(adapter, graphs, key, batch, indices, ranks)


def _time_items(
    adapter: EncoderAdapter,
    graphs: GraphSet,
    key: GraphKey,
    batch: EncoderBatch,
    indices: Sequence[int],
    ranks: EncoderRanks,
) -> float:
    return _time(lambda: graphs.replay(key, adapter, batch, indices), ranks)


def _time_eager(
    adapter: EncoderAdapter, graphs: GraphSet, key: GraphKey, ranks: EncoderRanks
) -> tuple[int, float]:
    mm_kwargs = adapter.cost_sample(graphs.shapes[key])
    batch = None if mm_kwargs is None else adapter.parse(mm_kwargs)
    assert batch is not None  # the replay of this key was timed on it
    indices = _items_on_path(batch.specs, key.path)
    tokens = sum(batch.specs[i].get_path_output_tokens(key.path) for i in indices)
    return tokens, _time(lambda: adapter.eager(batch, indices, key.path), ranks)


def _items_on_path(specs: Sequence[EncoderItemSpec], path: str) -> list[int]:
    return [i for i, spec in enumerate(specs) if spec.get_path_output_tokens(path)]


def _time(
    call: Callable[[], torch.Tensor], ranks: EncoderRanks, repeats: int = 3
) -> float:
    """Median milliseconds of a synchronised call, after one that does not count;
    fewer repeats where a call takes long."""
    times: list[float] = []
    with torch.inference_mode():
        call()
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
            if ranks.in_step(times[-1] > 50.0):
                break
    return statistics.median(times)
