# SPDX-License-Identifier: Apache-2.0
"""The encoder's metrics at ``/metrics``, and their values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.observability.metrics import EncoderStats


@dataclass(frozen=True)
class Metric:
    """One name at ``/metrics``."""

    name: str
    """As it is exposed, without ``_total``."""
    kind: str
    """``"counter"`` or ``"gauge"``; a gauge shows its largest rank."""
    help: str
    labels: tuple[str, ...] = ()
    """Beside ``model_name`` and ``engine``."""


def _metric(kind: str, name: str, text: str, *labels: str) -> Metric:
    return Metric(f"vllm:encoder_cudagraph_{name}", kind, text, labels)


QUERIES = _metric("counter", "queries", "Images and videos to encode.")
HITS = _metric(
    "counter", "hits", "Images and videos that were encoded by CUDA graphs alone."
)
MISSES = _metric(
    "counter",
    "misses",
    "Images and videos that were encoded eagerly, if only in part, by reason.",
    "reason",
)
BATCHES = _metric("counter", "batches", "Batches of images or videos.")
REPLAYS = _metric(
    "counter", "replays", "Replays of encoder CUDA graphs.", "path", "token_budget"
)
EAGER_CALLS = _metric("counter", "eager_calls", "Encoder forwards without a graph.")
REAL_TOKENS = _metric(
    "counter", "real_tokens", "Output tokens of replays that belong to items."
)
PADDED_TOKENS = _metric(
    "counter", "padded_tokens", "Output tokens that replays computed beyond those."
)
REPLAY_SECONDS = _metric(
    "counter", "replay_seconds", "Time of replays, estimated from sampled batches."
)
EAGER_SECONDS = _metric(
    "counter",
    "eager_seconds",
    "Time of encoder forwards without a graph, estimated from sampled batches.",
)
GRAPHS = _metric("gauge", "graphs", "Encoder CUDA graphs in use.")
MEMORY_BYTES = _metric(
    "gauge", "memory_bytes", "GPU memory of encoder CUDA graphs and their buffers."
)

METRICS = (
    QUERIES,
    HITS,
    MISSES,
    BATCHES,
    REPLAYS,
    EAGER_CALLS,
    REAL_TOKENS,
    PADDED_TOKENS,
    REPLAY_SECONDS,
    EAGER_SECONDS,
    GRAPHS,
    MEMORY_BYTES,
)

Sample = tuple[Metric, tuple[str, ...], float]
"""A metric, values of its own labels, and the value."""


def samples(stats: EncoderStats) -> Iterator[Sample]:
    """What `stats` says; may be called while another thread counts."""
    misses = dict(stats.misses)
    yield QUERIES, (), stats.items
    yield HITS, (), stats.hits
    for reason in EagerReason:
        yield MISSES, (reason.value,), misses.get(reason, 0)
    yield BATCHES, (), stats.batches
    for path, of_path in stats.replays_by_budget().items():
        for budget, count in of_path.items():
            yield REPLAYS, (path, str(budget)), count
    yield EAGER_CALLS, (), stats.eager_calls
    yield REAL_TOKENS, (), stats.real_tokens
    yield PADDED_TOKENS, (), stats.padded_tokens
    yield REPLAY_SECONDS, (), stats.replay_seconds
    yield EAGER_SECONDS, (), stats.eager_seconds
    yield GRAPHS, (), stats.graphs
    yield MEMORY_BYTES, (), stats.graph_memory_bytes
