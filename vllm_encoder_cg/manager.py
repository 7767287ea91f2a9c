# SPDX-License-Identifier: Apache-2.0
"""``EncoderCudaGraphManager``: captures an encoder's graphs and runs batches.

Per batch: parse -> plan -> for each sub-batch and path: fill, replay or eager
-> assemble.  What a plan is, what fits and what it costs is ``planner.py``;
what a model's inputs look like is its adapter's business.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, EncoderBatch, GraphShape
from vllm_encoder_cg.batch_executor import BatchExecutor
from vllm_encoder_cg.data_parallel import EmbeddingGather
from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.models.registry import adapt
from vllm_encoder_cg.observability.batch_log import BatchLog, Observer
from vllm_encoder_cg.observability.metrics import EncoderStats
from vllm_encoder_cg.observability.reporter import Reporter
from vllm_encoder_cg.observability.step_timer import StepTimer
from vllm_encoder_cg.observability.trace import trace_header
from vllm_encoder_cg.plan_runner import PlanRunner
from vllm_encoder_cg.planning.costs import CostModel
from vllm_encoder_cg.planning.planner import Planner
from vllm_encoder_cg.planning.plans import Plan
from vllm_encoder_cg.planning.sharding import PathRate
from vllm_encoder_cg.ranks import EncoderRanks, stage_refusal
from vllm_encoder_cg.settings import EncoderCgSettings, SettingError
from vllm_encoder_cg.shapes import choose_shapes, plan_budgets
from vllm_encoder_cg.startup.capture import capture_graphs
from vllm_encoder_cg.startup.forward_choice import choose_forward
from vllm_encoder_cg.startup.known_costs import KnownCosts, usable_cost_file
from vllm_encoder_cg.startup.memory_meter import give_back_cached
from vllm_encoder_cg.startup.self_check import SelfCheck
from vllm_encoder_cg.startup.stopwatch import Stopwatch
from vllm_encoder_cg.weights import WeightWatch

logger = init_logger(__name__)


class EncoderCudaGraphManager:
    """Takes the place of vLLM's class of that name.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        device: where the encoder runs.
        dtype: the model's dtype.
        model: the loaded model.

    Raises:
        SettingError: a setting is invalid; the message names field, value and
            remedy.
        OutOfStepError: another tensor-parallel rank makes no manager.
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
        self.inactive_reason = self.inactive_reason or stage_refusal(vllm_config)
        self._was_captured = False
        self._capture_time = Stopwatch()
        self.stats = EncoderStats()
        self._timer = StepTimer(self.device, self.stats)
        self.observer: Observer | None = None
        """Called after each batch with its plan as it was run; None: nobody."""
        self._graphs = GraphSet.empty(self.device)
        self._weights = WeightWatch(None)
        self._executor: BatchExecutor | None = None
        """As long as there are graphs."""
        self.costs: CostModel | None = None
        """What the planner prices plans by; None: packed as the reference
        design packs.  The same table on every rank."""
        self._rates: dict[str, PathRate] | None = None
        """What items are shared by; None: by input size."""
        self.token_budgets: list[int] = []
        self._shapes: list[GraphShape] = []
        self._ranks = EncoderRanks.from_config(vllm_config)
        wrong_setting: SettingError | None = None
        if self.active:
            try:
                self._set_up()
            except SettingError as error:
                wrong_setting = error
                self.inactive_reason = str(error)
            except Exception as error:
                # The model is not what the adapter knows; the server starts all
                # the same.
                self.inactive_reason = (
                    f"its adapter cannot describe it: {type(error).__name__}: {error}"
                )
        # In capture, ranks wait for each other: all come there, or none does.
        self.inactive_reason = self._ranks.why_not_all(self.inactive_reason)
        if wrong_setting is not None:
            raise wrong_setting
        if not self.active:
            self.token_budgets, self._shapes = [], []
            logger.info(
                "Encoder CUDA graphs stay off for %s: %s",
                type(model).__name__,
                self.inactive_reason,
            )

    def _set_up(self) -> None:
        """What is known of the graphs before they are captured."""
        self.config = self.adapter.config()
        self.budgets = plan_budgets(self.adapter, self.config, self.settings)
        self.token_budgets = list(self.budgets.token_budgets)
        self._shapes = choose_shapes(
            self.adapter, self.config, self.budgets, self.settings.max_graphs
        )
        self._check = self._make_check()
        self._gather = EmbeddingGather(
            self._ranks, self.config.out_hidden_size, self.dtype, self.device
        )
        self._reporter = Reporter(
            self.vllm_config,
            self.settings,
            self.stats,
            speaks_for_all=self._ranks.rank == 0,
            share_items=self._ranks.share_items,
        )

    def _make_check(self) -> SelfCheck:
        return SelfCheck(
            self.adapter, self._ranks, self.settings.on_mismatch == "raise"
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
        return self._executor is not None

    def largest_budget(self) -> int:
        """Of the graphs that there are, of whichever path; 0 without any."""
        return max((key.token_budget for key in self._graphs.graphs), default=0)

    def describe_graphs(self) -> str:
        """How many there are, and for how many tokens, by path."""
        return self._graphs.describe()

    def computed_tokens(self, key: GraphKey) -> int:
        """Output tokens that a replay of a graph computes: its budget, or more where
        it is of whole rows or tiles."""
        return self._graphs.shapes[key].capacity.tokens

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
        watch = Stopwatch()
        refusal = None
        if self._was_captured:
            # Perhaps a module that the adapter holds is another now, or is wrapped.
            self.adapter, refusal = adapt(self.model, self.vllm_config)
            self._check = self._make_check()
        self._was_captured = True
        self.clear()
        if not self._shapes:
            return
        refusal = self._ranks.why_not_all(refusal)
        if refusal is not None:
            logger.warning("Encoder CUDA graphs are not captured again: %s", refusal)
            return
        known = KnownCosts(
            usable_cost_file(self.settings, self.device),
            self.adapter,
            self.device,
            self._ranks,
            self.settings.fused,
        )
        choose_forward(
            self.adapter,
            self._shapes,
            self.budgets.limits,
            self.device,
            self._ranks,
            known.forward_setting,
        )
        watch.lap("forward")
        limit_gib = self.settings.memory_limit_gib
        self._graphs = capture_graphs(
            self.adapter,
            self._shapes,
            self.budgets.limits,
            self.device,
            graph_pool,
            self._ranks,
            None if limit_gib is None else limit_gib * 2**30,
        )
        watch.lap("capture")
        if self.settings.self_check:
            self._check.after_capture(self._graphs)
            watch.lap("check")
        if not self._ranks.any(bool(self._graphs.graphs)):
            logger.warning(
                "No encoder CUDA graph could be captured and equals eager; the "
                "encoder runs eagerly"
            )
            self._graphs = GraphSet.empty(self.device)
            give_back_cached(self.device)
            return
        self._weights = WeightWatch(self.model)
        if self.device.type == "cuda":
            if self.settings.cost_model:
                self.costs, self._rates = known.load_or_measure(self._graphs)
                watch.lap("costs")
            if self._ranks.share_items:
                self._gather.measure()
        # Of eager forwards.  The runners take what is missing now for graphs, and
        # leave so much less to the KV cache.
        give_back_cached(self.device)
        self._executor = self._make_executor()
        self._count_graphs()
        watch.lap("rest")
        self._capture_time = watch
        self._start_reports()
        logger.info("Encoder CUDA graphs: %s; %s", self._graphs.summary(), watch)

    def _make_executor(self) -> BatchExecutor:
        graphs = self._graphs
        return BatchExecutor(
            self.adapter,
            self._make_planner(),
            PlanRunner(self.adapter, graphs, self._check, self._timer, self._plan_anew),
            self._ranks,
            self._gather,
            self._rates,
            BatchLog(
                self.stats, self._reporter, self._ranks, graphs.shapes, self._observe
            ),
        )

    def _start_reports(self) -> None:
        self._timer.watch(self.model)
        shapes = {key: self._graphs.shapes[key] for key in self._graphs.graphs}
        header = trace_header(
            type(self.model).__name__,
            self.adapter.budget_range(),
            self.config.paths,
            shapes,
            self.budgets.limits.max_items,
            self._graphs.memory_bytes,
        )
        self._reporter.start(header, shapes)

    def _plan_anew(self) -> None:
        """Has batches planned with the graphs that are left."""
        if self._executor is not None:
            self._executor.planner = self._make_planner()
        self._count_graphs()

    def _make_planner(self) -> Planner:
        graphs = self._graphs
        return Planner(
            {key: graphs.shapes[key].capacity for key in graphs.graphs},
            tuple(self.config.paths),
            dropped=graphs.dropped,
            costs=self.costs,
        )

    def _count_graphs(self) -> None:
        self.stats.graphs = len(self._graphs.graphs)
        self.stats.graph_memory_bytes = self._graphs.memory_bytes

    def clear(self) -> None:
        """Releases all graphs and their buffers; ``execute`` then returns None
        until the next ``capture``."""
        self._graphs.wait()
        self._executor = None
        self.costs = None
        self._rates = None
        self._graphs = GraphSet.empty(self.device)
        self._count_graphs()
        self._weights = WeightWatch(None)

    def check_weights(self, model: Any = None) -> None:
        """Drops all graphs if a weight of the encoder was replaced since they were
        captured: they would go on with the one before.  The model then encodes by
        itself until the next ``capture``.

        Args:
            model: the one that is in use now; None: still the same.
        """
        if model is not None and model is not self.model:
            self._drop_stale_graphs("the whole model")
        else:
            self._drop_stale_graphs(self._weights.find_replaced())

    def _drop_stale_graphs(self, replaced: str | None) -> None:
        executor = self._executor
        if replaced is None or executor is None or executor.stale:
            return
        executor.stale = True
        self._graphs.drop_all()
        self._count_graphs()
        logger.error(
            "A weight of %s was replaced (%s), so its encoder CUDA graphs, which read "
            "the one before, are dropped and the encoder runs eagerly. Write new "
            "values into the parameters instead, as vLLM's reload_weights does, or "
            "call the manager's capture() afterwards",
            type(self.model).__name__,
            replaced,
        )

    def time_every_batch(self) -> None:
        """Makes ``replay_seconds`` and ``eager_seconds`` of later batches exact, where
        about every eighth is timed otherwise."""
        self._timer.time_every_batch()

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
        if self._executor is None:
            return None
        self._drop_stale_graphs(self._weights.glance())
        self._timer.begin_batch()
        outputs = self._executor.execute(mm_kwargs)
        if outputs is None:
            self._timer.expect_own_path()
        return outputs

    def _observe(
        self, batch: EncoderBatch, plan: Plan, outputs: list[torch.Tensor] | None
    ) -> None:
        if self.observer is not None:
            self.observer(batch, plan, outputs)

    # -- Statistics ------------------------------------------------------------

    def get_cumulative_stats(self) -> dict[str, Any]:
        """Counts since start: vLLM's keys (``graph_hits``, ``graph_misses``,
        ``hit_rate``, ``num_budgets``, ``token_budgets``) and those of
        ``EncoderStats.as_dict``."""
        self._timer.collect()
        return self.stats.as_dict() | {
            "token_budgets": self.token_budgets,
            "dropped_graphs": [str(key) for key in self._graphs.dropped],
            "capture_seconds": self._capture_time.total,
            "capture_phases": dict(self._capture_time.seconds),
        }

    def log_final_stats(self) -> None:
        """Logs the counts once more, where anything was counted, and writes what is
        to be read elsewhere (metrics, trace)."""
        if self.active:
            self._timer.collect()
            self._reporter.close()
