# SPDX-License-Identifier: Apache-2.0
"""Encoder counts at the ``/metrics`` of ``vllm serve``.

The counts are in worker processes; ``/metrics`` is served by API servers.  They meet
in a folder: each counted worker keeps its values in files of prometheus_client's
multiprocess mode, and what serves ``/metrics`` adds up all of them at each scrape.

- One API server: it serves the default registry.  ``offer_metrics()``, called as vLLM
  loads plug-ins and so before any worker exists, makes a temporary folder, names it
  in an environment variable that the workers inherit, and registers a collector that
  reads it.  vLLM's ``unregister_vllm_metrics()`` takes away collectors whose own name
  begins with ``vllm:``; this one has none.
- Several API servers, or ``PROMETHEUS_MULTIPROC_DIR`` set by the user: vLLM serves
  the files of that folder, from whichever API server is asked.  The workers write
  theirs into it, under names that no other writer uses.

Riding on ``SchedulerStats``, or asking the workers by RPC, would replace internals of
vLLM in three kinds of processes, show one tensor-parallel rank only or make the
engine wait at each scrape; this way replaces nothing, and costs the forward nothing.
Its limit: a worker on another host than the API server is not seen.

Labels are vLLM's ``model_name`` and ``engine`` (the data-parallel rank).  Where
tensor-parallel ranks share a batch's items, the values are sums over the ranks;
where all take part in each forward, those of the first.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.integration.environment import METRICS_DIR
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.observability.metrics import EncoderStats
from vllm_encoder_cg.observability.metrics_folder import (
    join_or_make_folder,
    leave_folder,
)

logger = init_logger(__name__)

VLLM_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable: as ``METRICS_DIR``, for all of vLLM; comes first."""


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


# -- In workers -------------------------------------------------------------------

FILE_BYTES = 1 << 18
"""Size of a file: room for some 800 values."""

_file_numbers = itertools.count()


class MetricsFiles:
    """The values of one manager, in files that another process reads.

    The files have their full size from the start: to write to a mapped page for which
    the disk has no room would end the process.  Values beyond it are left out.

    Args:
        folder: an existing one.
        model_name: what vLLM's own metrics have as ``model_name``.
        engine: number of the engine among data-parallel ones.

    Raises:
        OSError: a file cannot be made.
    """

    def __init__(self, folder: Path, model_name: str, engine: int) -> None:
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        # Read by MultiProcessCollector: what precedes the first "_" is the type,
        # what follows it in a gauge's how ranks are merged.
        owner = f"encoder-cg-{os.getpid()}-{next(_file_numbers)}"
        paths = {
            "counter": folder / f"counter_{owner}.db",
            "gauge": folder / f"gauge_max_{owner}.db",
        }
        for path in paths.values():
            with path.open("xb") as stream:
                os.posix_fallocate(stream.fileno(), 0, FILE_BYTES)
        self._files = {kind: MmapedDict(str(path)) for kind, path in paths.items()}
        self._room = dict.fromkeys(paths, FILE_BYTES - 8)
        self._make_key = mmap_key
        self._labels = {"model_name": model_name, "engine": str(engine)}
        self._keys: dict[tuple[str, tuple[str, ...]], str | None] = {}
        """None: there was no room left."""
        self._written: dict[str, float] = {}

    def write(self, values: Iterable[Sample]) -> None:
        """Brings the files up to date."""
        for metric, labels, value in values:
            if (metric.name, labels) not in self._keys:
                self._add(metric, labels)
            key = self._keys[metric.name, labels]
            if key is not None and self._written.get(key) != value:
                self._files[metric.kind].write_value(key, value, 0.0)
                self._written[key] = value

    def _add(self, metric: Metric, labels: tuple[str, ...]) -> None:
        counts = metric.kind == "counter"
        key: str = self._make_key(
            metric.name,
            f"{metric.name}_total" if counts else metric.name,
            [*self._labels, *metric.labels],
            [*self._labels.values(), *labels],
            metric.help,
        )
        # Length, the key padded to whole words, value and time.
        taken = 4 + len(key.encode()) + 8 + 16
        fits = taken <= self._room[metric.kind]
        self._keys[metric.name, labels] = key if fits else None
        if fits:
            self._room[metric.kind] -= taken


def open_metrics_files(vllm_config: Any) -> MetricsFiles | None:
    """The files of a manager in this process; None: nobody is there to read them."""
    name = os.environ.get(VLLM_FOLDER) or os.environ.get(METRICS_DIR)
    if not name:
        return None
    folder = Path(name)
    if not folder.is_dir():
        logger.info(
            "Encoder metrics of this worker are not at /metrics: %s is not on this "
            "host, so the API server runs on another one",
            folder,
        )
        return None
    return MetricsFiles(
        folder,
        str(vllm_config.model_config.served_model_name),
        vllm_config.parallel_config.data_parallel_index,
    )


# -- In API servers ---------------------------------------------------------------


class EncoderMetricsCollector:
    """Adds up the files of a folder, for a registry of prometheus_client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._failed = False

    def describe(self) -> list[Any]:
        """The metrics without values, by which a registry knows their names."""
        from prometheus_client import Metric as Family

        return [Family(each.name, each.help, each.kind) for each in METRICS]

    def collect(self) -> Iterable[Any]:
        """The values now; none where they cannot be read, as a failure here would
        take vLLM's own metrics with it."""
        from prometheus_client.multiprocess import MultiProcessCollector

        found: Iterable[Any] = []
        try:
            if self.folder.is_dir():
                found = MultiProcessCollector(None, str(self.folder)).collect()
        except Exception:
            level = logger.debug if self._failed else logger.warning
            level("Cannot read encoder metrics in %s", self.folder, exc_info=True)
            self._failed = True
        return found


_collector: EncoderMetricsCollector | None = None


def offer_metrics() -> None:
    """Has this process's default registry show what its workers count.

    Raises:
        OSError: there cannot be a folder for it.
    """
    global _collector
    from prometheus_client import REGISTRY

    if _collector is None:
        collector = EncoderMetricsCollector(join_or_make_folder())
        REGISTRY.register(collector)
        _collector = collector


def withdraw_metrics() -> None:
    """Undoes ``offer_metrics``."""
    global _collector
    from prometheus_client import REGISTRY

    if _collector is not None:
        REGISTRY.unregister(_collector)
        _collector = None
    leave_folder()
