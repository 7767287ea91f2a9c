# SPDX-License-Identifier: Apache-2.0
"""What is counted, written and shown of each batch, whatever became of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from vllm_encoder_cg.adapter import EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import EagerReason, GraphKey
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.observability.metrics import EncoderStats
from vllm_encoder_cg.observability.reporter import Reporter
from vllm_encoder_cg.planning.plans import Plan
from vllm_encoder_cg.ranks import EncoderRanks

logger = init_logger(__name__)

Observer: TypeAlias = Callable[[EncoderBatch, Plan, list[torch.Tensor] | None], None]
"""Takes a batch, its plan, and what ``execute`` is about to return for it."""


class BatchLog:
    """One batch is one entry.

    Args:
        shapes: of the graphs.
        observe: called after each batch with its plan as it was run.
    """

    def __init__(
        self,
        stats: EncoderStats,
        reporter: Reporter,
        ranks: EncoderRanks,
        shapes: Mapping[GraphKey, GraphShape],
        observe: Observer,
    ) -> None:
        self._stats = stats
        self._reporter = reporter
        # Where ranks otherwise count an item each, the first counts batches, and
        # those of vLLM's own path.
        self._counts_unshared = not ranks.share_items or ranks.rank == 0
        self._shapes = shapes
        self._observe = observe
        self._failed = False

    def received(self, batch: EncoderBatch) -> None:
        """A batch that can be read, however it is encoded."""
        self._reporter.received(batch.modality, batch.specs)

    def finished(
        self, batch: EncoderBatch, plan: Plan, outputs: list[torch.Tensor] | None
    ) -> None:
        """A batch that has succeeded, whatever comes of counting it."""
        try:
            batches = 1 if self._counts_unshared else 0
            self._stats.count_plan(plan, self._shapes, batches=batches)
            self._reporter.encoded(plan)
            self._observe(batch, plan, outputs)
        except Exception:
            logger.warning("Cannot count or show a batch", exc_info=True)

    def refused(
        self, items: int = 1, reason: EagerReason = EagerReason.UNSUPPORTED_INPUT
    ) -> None:
        """A batch that vLLM's own path encodes on every rank."""
        if not self._counts_unshared:
            return
        try:
            self._stats.count_refused(items, reason)
            self._reporter.counted()
        except Exception:
            logger.warning("Cannot count or show a batch", exc_info=True)

    def failed(self, batch: EncoderBatch | None) -> None:
        """A batch that raised and goes to the model's own path; None: it could not
        even be read."""
        if not self._failed:
            self._failed = True
            # As text: whoever keeps the record must not keep tensors with it.
            logger.error(
                "Encoder CUDA graphs could not run a batch; it goes to the "
                "model's own path (further failures are only counted)\n%s",
                traceback.format_exc(),
            )
        items = 1 if batch is None else len(batch.specs)
        self.refused(items, EagerReason.FAILED)
