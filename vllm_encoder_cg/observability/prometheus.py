# SPDX-License-Identifier: Apache-2.0
"""Encoder counts at the ``/metrics`` of ``vllm serve``.

The counts are in worker processes; ``/metrics`` is served by API servers.  They meet
in a folder: each counted worker keeps its values in files of prometheus_client's
multiprocess mode (``metrics_files.py``), and what serves ``/metrics`` adds up all of
them at each scrape.

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

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.observability.exposed_metrics import METRICS
from vllm_encoder_cg.observability.metrics_folder import (
    join_or_make_folder,
    leave_folder,
)

logger = init_logger(__name__)


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
