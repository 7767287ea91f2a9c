# SPDX-License-Identifier: Apache-2.0
"""Runs a plan: replays and eager calls, in the order of its sub-batches.

The road of every batch, so it is kept short: what is done before the launch of a
replay is time during which the GPU waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.observability.step_timer import StepTimer
from vllm_encoder_cg.planning.plans import Plan, SubBatch, without_graphs
from vllm_encoder_cg.startup.self_check import SelfCheck


class PlanRunner:
    """Runs plans by a set of graphs.

    Args:
        on_drop: called after graphs were dropped, so that they are planned with no
            longer.
    """

    def __init__(
        self,
        adapter: EncoderAdapter,
        graphs: GraphSet,
        check: SelfCheck,
        timer: StepTimer,
        on_drop: Callable[[], None],
    ) -> None:
        self._adapter = adapter
        self._graphs = graphs
        self._check = check
        self._timer = timer
        self._on_drop = on_drop

    def run(self, batch: EncoderBatch, plan: Plan) -> tuple[list[torch.Tensor], Plan]:
        """The embeddings of the plan's items, in the order of the batch, and the
        plan as it was run."""
        if torch.is_inference_mode_enabled():  # as in vLLM's runners
            return self._run(batch, plan)
        with torch.inference_mode():
            return self._run(batch, plan)

    def _run(self, batch: EncoderBatch, plan: Plan) -> tuple[list[torch.Tensor], Plan]:
        if len(plan.sub_batches) == 1:
            (planned,) = plan.sub_batches
            embeddings, run = self._run_sub_batch(batch, planned)
            return embeddings, plan if run is planned else Plan((run,))
        outputs: dict[int, torch.Tensor] = {}
        runs = []
        for planned in plan.sub_batches:
            embeddings, run = self._run_sub_batch(batch, planned)
            outputs.update(zip(run.indices, embeddings, strict=True))
            runs.append(run)
        return [outputs[index] for index in sorted(outputs)], Plan(tuple(runs))

    def _run_sub_batch(
        self, batch: EncoderBatch, sub_batch: SubBatch
    ) -> tuple[list[torch.Tensor], SubBatch]:
        if self._graphs.dropped:  # perhaps since the plan was made
            sub_batch = self._without_dropped(batch, sub_batch)
        rows = {}
        for path, step in sub_batch.steps.items():
            with self._timer.step(by_graph=step.key is not None):
                if step.key is None:
                    rows[path] = self._adapter.eager(batch, sub_batch.indices, path)
                else:
                    rows[path] = self._graphs.replay(
                        step.key, self._adapter, batch, sub_batch.indices
                    )
        embeddings = self._adapter.assemble(batch, sub_batch.indices, rows)
        eager = self._check.on_use(self._graphs, batch, sub_batch, embeddings)
        if eager is None:
            return embeddings, sub_batch
        self._on_drop()
        # Those that are still there were right to be doubted, not shown to be wrong.
        sub_batch = self._without_dropped(batch, sub_batch)
        return eager, without_graphs(
            sub_batch, batch.specs, EagerReason.UNCHECKED_GRAPH
        )

    def _without_dropped(self, batch: EncoderBatch, sub_batch: SubBatch) -> SubBatch:
        return without_graphs(
            sub_batch, batch.specs, EagerReason.DROPPED_GRAPH, self._graphs.graphs
        )
