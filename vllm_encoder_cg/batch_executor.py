# SPDX-License-Identifier: Apache-2.0
"""Encodes batches: parse -> share -> plan -> run -> gather.

Nothing raises out of here but ranks that are out of step: vLLM's engine would end
with it, and with it every other request.  What cannot be done goes to vLLM's own
path, which decides what a batch deserves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_encoder_cg.adapter import EncoderAdapter
from vllm_encoder_cg.data_parallel import EmbeddingGather
from vllm_encoder_cg.definitions import EagerReason, EncoderItemSpec
from vllm_encoder_cg.exchange_clock import ExchangeClock
from vllm_encoder_cg.observability.batch_log import BatchLog
from vllm_encoder_cg.plan_runner import PlanRunner
from vllm_encoder_cg.planning.delays import RankDelays
from vllm_encoder_cg.planning.planner import Planner
from vllm_encoder_cg.planning.plans import Plan
from vllm_encoder_cg.planning.sharding import (
    Assignment,
    PathRate,
    assign_items,
    place,
    weigh_items,
)
from vllm_encoder_cg.ranks import EncoderRanks, OutOfStepError


class BatchExecutor:
    """Encodes batches by the graphs of one capture.

    Args:
        rates: what items are shared over ranks by; None: by input size.
    """

    def __init__(
        self,
        adapter: EncoderAdapter,
        planner: Planner,
        runner: PlanRunner,
        ranks: EncoderRanks,
        gather: EmbeddingGather,
        rates: Mapping[str, PathRate] | None,
        log: BatchLog,
    ) -> None:
        self.planner = planner
        """Replaced when graphs are dropped."""
        self.stale = False
        """Whether all graphs were dropped because weights were replaced."""
        self.log = log
        self._adapter = adapter
        self._runner = runner
        self._ranks = ranks
        self._gather = gather
        self._rates = rates
        self._clock = ExchangeClock(gather.device)
        self._delays = RankDelays(ranks.size)
        self._last_work = 0.0
        """Of the batch that was last exchanged, so the same on all ranks; 0: that one
        was noted, or there is none."""

    def execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """One embedding per item; None: the batch is for vLLM's own path."""
        if self._ranks.share_items:
            return self._execute_share(mm_kwargs)
        return self._execute(mm_kwargs)

    def _execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """A batch on this rank, or in step with all ranks."""
        batch = None
        try:
            batch = self._adapter.parse(mm_kwargs)
            if batch is None:
                self.log.refused()
                return None
            self.log.received(batch)
            if self.stale:
                self.log.refused(len(batch.specs), EagerReason.DROPPED_GRAPH)
                return None
            plan = self.planner.plan(batch.specs)
            outputs = None
            if not _wholly_eager(plan):
                outputs, plan = self._runner.run(batch, plan)
        except Exception as error:
            self._ranks.fail_alike(error)
            self.log.failed(batch)
            return None
        self.log.finished(batch, plan, outputs)
        return outputs

    def _execute_share(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """This rank's items of a batch, and by exchange those of the others.

        Whatever a rank decides by itself (its plan, a graph that it lacks, a
        failure) ends here: all ranks take part in the exchange, or none does.
        """
        batch = rows = None
        work = 0.0
        elapsed_us = self._clock.elapsed_us()
        self._clock.begin()
        try:
            batch = self._adapter.parse(mm_kwargs)
            if batch is None:  # of equal arguments, so on every rank
                self.log.refused()
                return None
            self.log.received(batch)
            specs = batch.specs
            if not self.stale:
                assignment, work = self._assign(specs)
                items = assignment.items[self._ranks.rank]
                plan = place(self.planner.plan([specs[i] for i in items]), items)
                outputs, plan = self._runner.run(batch, plan)
                rows = self._gather.pack(outputs, specs, assignment)
        except Exception:
            self.log.failed(batch)
        # On the host, while the GPU is busy with the rows.
        agreed, elapsed = self._ranks.vote(rows is not None, elapsed_us)
        self._delays.observe([us / 1e3 for us in elapsed], self._last_work)
        self._last_work = 0.0
        if not agreed:
            if rows is not None and batch is not None:
                self.log.refused(len(batch.specs), EagerReason.FAILED)
            elif self.stale and batch is not None:
                self.log.refused(len(batch.specs), EagerReason.DROPPED_GRAPH)
            return None
        assert batch is not None and rows is not None
        try:
            embeddings = self._gather.gather(rows, specs, assignment)
        except Exception as error:
            # The others are inside the exchange, and cannot be told.
            raise OutOfStepError(
                "encoder CUDA graphs: the exchange of embeddings failed on rank "
                f"{self._ranks.rank} of {self._ranks.size}; another rank may have "
                f"ended, and its log says why ({type(error).__name__}: {error})"
            ) from error
        self._clock.end()
        self._last_work = work
        self.log.finished(batch, plan, embeddings)
        return embeddings

    def _assign(self, specs: Sequence[EncoderItemSpec]) -> tuple[Assignment, float]:
        """Which rank encodes what, the same on all ranks; and what all items weigh."""
        weights = weigh_items(specs, self._rates)
        work = sum(weights)
        # Input sizes are no times, which delays could be added to.
        late_by = None if self._rates is None else self._delays.expect(work)
        return assign_items(specs, self._ranks.size, weights, late_by), work


def _wholly_eager(plan: Plan) -> bool:
    return bool(plan.sub_batches) and all(
        step.key is None
        for sub_batch in plan.sub_batches
        for step in sub_batch.steps.values()
    )
