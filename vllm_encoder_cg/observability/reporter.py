# SPDX-License-Identifier: Apache-2.0
"""What a manager says about its batches: log lines, table, metrics, trace.

Counting happens in the forward; everything that touches a file happens in a thread
beside it, once a second and at shutdown.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.definitions import EncoderItemSpec, GraphKey
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.observability.exposed_metrics import samples
from vllm_encoder_cg.observability.metrics import EncoderStats
from vllm_encoder_cg.observability.metrics_files import (
    MetricsFiles,
    open_metrics_files,
)
from vllm_encoder_cg.observability.metrics_table import EncoderCudaGraphTable
from vllm_encoder_cg.observability.trace import TraceHeader
from vllm_encoder_cg.observability.trace_writer import TraceWriter, check_trace_file
from vllm_encoder_cg.planning.plans import Plan
from vllm_encoder_cg.settings import EncoderCgSettings

logger = init_logger(__name__)

PUBLISH_SECONDS = 1.0
"""Metrics and trace are at most so far behind."""


class Reporter:
    """Reports what `stats` counts and which batches came.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        settings: ``log_every_items``, ``trace_file`` and ``trace_max_mib`` of them.
        stats: counted by the manager.
        speaks_for_all: whether this rank reports what every tensor-parallel rank
            knows alike: the trace, and all counts and lines unless ranks share items.
        share_items: whether ranks encode different items, so that each counts.

    Raises:
        SettingError: ``trace_file`` cannot be written to.
    """

    def __init__(
        self,
        vllm_config: Any,
        settings: EncoderCgSettings,
        stats: EncoderStats,
        *,
        speaks_for_all: bool = True,
        share_items: bool = False,
    ) -> None:
        self._vllm_config = vllm_config
        self._stats = stats
        self._every = settings.log_every_items
        self._trace_file = settings.trace_file if speaks_for_all else None
        self._trace_max_bytes = settings.trace_max_mib * 2**20
        self._counted = speaks_for_all or share_items
        if self._trace_file is not None:
            check_trace_file(self._trace_file)
        observability = getattr(vllm_config, "observability_config", None)
        self._table: EncoderCudaGraphTable | None = None
        if getattr(observability, "cudagraph_metrics", False):
            self._table = EncoderCudaGraphTable()
        self._shapes: Mapping[GraphKey, GraphShape] = {}
        self._logged_items = 0
        self._trace: TraceWriter | None = None
        self._files: MetricsFiles | None = None
        self._publishing = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, header: TraceHeader, shapes: Mapping[GraphKey, GraphShape]) -> None:
        """Begins to report, as there are graphs; again: they are others now.

        Args:
            header: of the trace.
            shapes: of the graphs.
        """
        self._shapes = shapes
        if self._thread is not None:
            return
        if self._trace_file is not None:
            self._trace = TraceWriter(self._trace_file, self._trace_max_bytes, header)
        if self._counted:
            try:
                self._files = open_metrics_files(self._vllm_config)
            except Exception:
                logger.warning(
                    "Encoder metrics of this worker are not at /metrics", exc_info=True
                )
        if self._trace is None and self._files is None:
            return
        self._thread = threading.Thread(
            target=_publish_until_closed,
            args=(weakref.ref(self), self._closed),
            name="encoder-cg-reporter",
            daemon=True,
        )
        self._thread.start()

    def received(self, modality: str, specs: Sequence[EncoderItemSpec]) -> None:
        """Takes note of a batch, however it is encoded."""
        if self._trace is not None:
            self._trace.add(modality, specs)

    def encoded(self, plan: Plan) -> None:
        """Takes note of a plan as it was run, which `stats` has counted."""
        if self._table is not None:
            self._table.add(plan, self._shapes)
        self.counted()

    def counted(self) -> None:
        """Takes note that `stats` has counted a batch, however it was encoded."""
        # Crossed, not met: a batch may have any number of items.
        if self._every and self._stats.items - self._logged_items >= self._every:
            self._log()

    def publish(self) -> None:
        """Writes metrics and trace; never raises."""
        with self._publishing:
            try:
                if self._files is not None:
                    self._files.write(samples(self._stats))
            except Exception:
                self._files = None
                logger.warning("Encoder metrics are no longer written", exc_info=True)
            if self._trace is not None:
                self._trace.flush()

    def close(self) -> None:
        """Logs and writes the last counts; further calls do nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._stats.items:
            self._log()
        self.publish()
        with self._publishing:
            if self._trace is not None:
                self._trace.close()

    def _log(self) -> None:
        self._logged_items = self._stats.items
        if not self._counted:
            return
        logger.info("%s", self._stats.log_line())
        if self._table is None:
            return
        budgets: dict[str, list[int]] = {}
        for key in self._shapes:
            of_path = budgets.setdefault(key.path, [])
            if key.token_budget not in of_path:
                of_path.append(key.token_budget)
        if table := self._table.take(budgets):
            logger.info("%s", table)


def _publish_until_closed(
    reporter: weakref.ref[Reporter], closed: threading.Event
) -> None:
    """Publishes every second, and ends with the manager at the latest."""
    while not closed.wait(PUBLISH_SECONDS):
        owner = reporter()
        if owner is None:
            return
        owner.publish()
        del owner
