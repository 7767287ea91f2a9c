# SPDX-License-Identifier: Apache-2.0
"""A worker's side of ``/metrics``: its values in files that API servers read
(``prometheus.py``)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_encoder_cg.integration.environment import METRICS_DIR
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.observability.exposed_metrics import Metric, Sample

logger = init_logger(__name__)

VLLM_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable: as ``METRICS_DIR``, for all of vLLM; comes first."""

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
