# SPDX-License-Identifier: Apache-2.0
"""``EncoderCudaGraphManager``: captures an encoder's graphs and runs batches.

Per batch: parse -> plan -> for each sub-batch and path: fill, replay or eager
-> assemble.  What a plan is, what fits and what it costs is ``planner.py``;
what a model's inputs look like is its adapter's business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from vllm_encoder_cg import self_check
from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch
from vllm_encoder_cg.budgets import BudgetPlan, resolve_budgets
from vllm_encoder_cg.capture import GraphSet, capture_graphs
from vllm_encoder_cg.costs import CostModel
from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.measurement import measure_costs
from vllm_encoder_cg.metrics import EncoderStats
from vllm_encoder_cg.models.registry import adapt
from vllm_encoder_cg.planner import Plan, Planner, SubBatch
from vllm_encoder_cg.settings import CompilationFields, EncoderCgSettings
from vllm_encoder_cg.shapes import choose_shapes

logger = init_logger(__name__)

Observer: TypeAlias = Callable[[EncoderBatch, Plan, list[torch.Tensor] | None], None]
"""Takes a batch, its plan, and what ``execute`` is about to return for it."""


class EncoderCudaGraphManager:
    """Takes the place of vLLM's class of that name.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        device: where the encoder runs.
        dtype: the model's dtype.
        model: the loaded model.

    Raises:
        ValueError: a setting is invalid; the message names field, value and
            remedy.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any
    ) -> None:
        self.vllm_config = vllm_config
        self.device = torch.device(device)
        self.dtype = dtype
        self.model = model
        self.settings = EncoderCgSettings.from_additional_config(
            vllm_config.additional_config
        )
        self.adapter: EncoderAdapter
        self.adapter, self.inactive_reason = adapt(model, vllm_config)
        self.stats = EncoderStats()
        self.observer: Observer | None = None
        """Called after each planned batch; None: nobody."""
        self._graphs = GraphSet.empty(self.device)
        self._planner: Planner | None = None
        self.costs: CostModel | None = None
        """What the planner prices plans by; None: packed as the reference
        design packs."""
        self._unchecked: set[GraphKey] = set()
        self._failed = False
        self._logged_items = 0
        if self.active:
            self.config = self.adapter.config()
            self.budgets = self._resolve_budgets()
            self.token_budgets = list(self.budgets.token_budgets)
            self._shapes = choose_shapes(
                self.adapter, self.config, self.budgets, self.settings.max_graphs
            )
        else:
            self.token_budgets = []
            self._shapes = []
            logger.info(
                "Encoder CUDA graphs stay off for %s: %s",
                type(model).__name__,
                self.inactive_reason,
            )

    def _resolve_budgets(self) -> BudgetPlan:
        multimodal = self.vllm_config.model_config.multimodal_config
        video_limit = (
            multimodal.get_limit_per_prompt("video")
            if "video" in self.config.modalities
            else 0
        )
        return resolve_budgets(
            CompilationFields.from_compilation_config(
                self.vllm_config.compilation_config
            ),
            self.settings,
            self.adapter.budget_range(),
            self.config.paths,
            self.config.max_frames_per_video,
            video_limit,
            axis_combinations=math.prod(map(len, self.config.capture_axes)),
        )

    # -- What vLLM's runners call -------------------------------------------

    @property
    def active(self) -> bool:
        """Whether this manager can serve this model at all."""
        return self.inactive_reason is None

    def supports_modality(self, modality: str) -> bool:
        """Whether batches of `modality` may come to ``execute``."""
        return self.active and modality in self.config.modalities

    def is_captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._planner is not None

    def get_num_graphs_to_capture(self) -> int:
        """Graphs that ``capture`` will try to record."""
        return len(self._shapes)

    def capture(self, graph_pool: Any = None) -> None:
        """Records all graphs, the largest first, and checks them.

        A graph that cannot be captured, or that differs from eager, is dropped
        with one line; what it would have held runs eagerly.  Capturing again
        replaces the graphs.

        Args:
            graph_pool: the pool to capture into; None: one of our own.

        Raises:
            RuntimeError: a graph differs from eager and ``on_mismatch`` is
                ``"raise"``.
        """
        begin = time.perf_counter()
        self.clear()
        if not self._shapes:
            return
        self._graphs = capture_graphs(
            self.adapter, self._shapes, self.budgets.limits, self.device, graph_pool
        )
        if self.settings.self_check:
            self._self_check()
        if not self._graphs.graphs:
            logger.warning(
                "No encoder CUDA graph could be captured; the encoder runs eagerly"
            )
            self._graphs = GraphSet.empty(self.device)
            return
        if self.settings.cost_model and self.device.type == "cuda":
            self.costs = measure_costs(self.adapter, self._graphs)
        self._make_planner()
        logger.info(
            "Encoder CUDA graphs: %s; %.1f s with check and measurement",
            self._graphs.summary(),
            time.perf_counter() - begin,
        )

    def _make_planner(self) -> None:
        graphs = self._graphs
        self._planner = Planner(
            {key: graphs.shapes[key].capacity for key in graphs.graphs},
            tuple(self.config.paths),
            dropped=graphs.dropped,
            costs=self.costs,
        )

    def clear(self) -> None:
        """Releases all graphs and their buffers; ``execute`` then returns None
        until the next ``capture``."""
        self._planner = None
        self._unchecked = set()
        self.costs = None
        self._graphs = GraphSet.empty(self.device)

    def poison_buffers(self) -> None:
        """Fills the captured buffers with NaN, to show in a test that nothing of
        an earlier replay is read."""
        self._graphs.arena.poison()

    def execute(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Encodes one batch of a single modality.

        Args:
            mm_kwargs: the batched keyword arguments of ``embed_multimodal``.

        Returns:
            One ``[tokens, hidden]`` tensor per item in the order of the batch,
            none of which a later call changes; None where the runner is to call
            ``embed_multimodal`` itself.
        """
        if self._planner is None:
            return None
        try:
            return self._execute(mm_kwargs, self._planner)
        except Exception:
            # An exception here would end the engine, and with it every other
            # request; vLLM's own path decides what this batch deserves.
            if not self._failed:
                self._failed = True
                logger.exception(
                    "Encoder CUDA graphs could not run a batch; it goes to the "
                    "model's own path (further failures are only counted)"
                )
            self.stats.count_unsupported()
            return None

    def _execute(
        self, mm_kwargs: dict[str, Any], planner: Planner
    ) -> list[torch.Tensor] | None:
        batch = self.adapter.parse(mm_kwargs)
        if batch is None:
            self.stats.count_unsupported()
            return None
        plan = planner.plan(batch.specs)
        result: list[torch.Tensor] | None = None
        if not _wholly_eager(plan):
            outputs: list[torch.Tensor | None] = [None] * len(batch.specs)
            with torch.inference_mode():
                for sub_batch in plan.sub_batches:
                    self._run(batch, sub_batch, outputs)
            result = [output for output in outputs if output is not None]
        self.stats.count_plan(plan)
        self._maybe_log()
        if self.observer is not None:
            self.observer(batch, plan, result)
        return result

    def _run(
        self,
        batch: EncoderBatch,
        sub_batch: SubBatch,
        outputs: list[torch.Tensor | None],
    ) -> None:
        rows = {
            path: (
                self._graphs.replay(step.key, self.adapter, batch, sub_batch.indices)
                if step.key is not None
                else self.adapter.eager(batch, sub_batch.indices, path)
            )
            for path, step in sub_batch.steps.items()
        }
        embeddings = self.adapter.assemble(batch, sub_batch.indices, rows)
        if self._unchecked:
            embeddings = self._check_on_first_use(batch, sub_batch, embeddings)
        for index, embedding in zip(sub_batch.indices, embeddings, strict=True):
            outputs[index] = embedding

    # -- Statistics ------------------------------------------------------------

    def get_cumulative_stats(self) -> dict[str, Any]:
        """Counts since start: vLLM's keys (``graph_hits``, ``graph_misses``,
        ``hit_rate``, ``num_budgets``, ``token_budgets``) and those of
        ``EncoderStats.as_dict``."""
        return self.stats.as_dict() | {
            "num_budgets": len(self._graphs.graphs),
            "token_budgets": self.token_budgets,
            "dropped_graphs": [str(key) for key in self._graphs.dropped],
            "graph_memory_bytes": self._graphs.memory_bytes,
        }

    def _maybe_log(self) -> None:
        every = self.settings.log_every_items
        if every and self.stats.items - self._logged_items >= every:
            self._logged_items = self.stats.items
            logger.info("%s", self.stats.log_line())

    def log_final_stats(self) -> None:
        """Logs the counts once more, where anything was counted."""
        if self.stats.items:
            logger.info("%s", self.stats.log_line())

    # -- Capture details ---------------------------------------------------------

    def _self_check(self) -> None:
        for key in self_check.keys_to_check(list(self._graphs.graphs)):
            try:
                mismatch = self_check.check_graph(
                    self.adapter,
                    self._graphs.shapes[key],
                    lambda batch, indices, key=key: self._graphs.replay(  # type: ignore[misc]
                        key, self.adapter, batch, indices
                    ),
                    seed=key.token_budget,
                )
            except self_check.NoSampleInputError:
                self._unchecked = set(self._graphs.graphs)
                return
            if mismatch is not None:
                self._reject(mismatch)

    def _check_on_first_use(
        self,
        batch: EncoderBatch,
        sub_batch: SubBatch,
        embeddings: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Compares a graph that no sample input exists for with eager, on the
        first batch that uses it; returns what may be handed out."""
        keys = [step.key for step in sub_batch.steps.values() if step.key is not None]
        if self._unchecked.isdisjoint(keys):
            return embeddings
        self._unchecked.difference_update(keys)
        eager = self.adapter.assemble(
            batch,
            sub_batch.indices,
            {
                path: self.adapter.eager(batch, sub_batch.indices, path)
                for path in sub_batch.steps
            },
        )
        mismatch = self_check.compare_items(keys[0], embeddings, eager)
        if mismatch is None:
            return embeddings
        for key in keys:
            self._graphs.drop(key)
        self._make_planner()
        self._reject(mismatch)
        return eager

    def _reject(self, mismatch: self_check.Mismatch) -> None:
        message = (
            f"Encoder CUDA graph ({mismatch.key}) of {type(self.model).__name__} "
            f"differs from eager by {mismatch.error:.2e} (relative norm; allowed: "
            f"{mismatch.tolerance:.0e}; attention backend: "
            f"{self.adapter.backend_name()})"
        )
        if self.settings.on_mismatch == "raise" and not self.is_captured():
            raise RuntimeError(
                f'{message}; additional_config.encoder_cg.on_mismatch is "raise"'
            )
        logger.error(
            "%s; the graph is dropped and what it would have held runs eagerly. "
            'Set additional_config.encoder_cg.on_mismatch to "raise" to stop the '
            "start instead",
            message,
        )
        self._graphs.drop(mismatch.key)


def _wholly_eager(plan: Plan) -> bool:
    return all(
        step.key is None
        for sub_batch in plan.sub_batches
        for step in sub_batch.steps.values()
    )
