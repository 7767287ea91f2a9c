# SPDX-License-Identifier: Apache-2.0
"""Benchmarks one captured encoder: eager, in-tree, ours and the floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_encoder_cg.benchmarking.cases import (
    GROWTH_ITEMS,
    GROWTH_TOKENS,
    BenchCase,
)
from vllm_encoder_cg.benchmarking.floor import exact_shape_graphs
from vllm_encoder_cg.benchmarking.in_tree import (
    InTree,
    capture_in_tree,
    pack_as_reference,
)
from vllm_encoder_cg.benchmarking.results import (
    EAGER,
    FLOOR,
    IN_TREE,
    OURS,
    EncoderBenchmark,
    GraphCost,
)
from vllm_encoder_cg.benchmarking.timing import (
    Call,
    CaseTimes,
    summarize,
    time_in_turn,
)
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.samples.encoder_inputs import image_batch, media_batch
from vllm_encoder_cg.verification_cases import images

if TYPE_CHECKING:
    from vllm_encoder_cg.adapter import EncoderBatch
    from vllm_encoder_cg.manager import EncoderCudaGraphManager
    from vllm_encoder_cg.planning.plans import Plan

logger = init_logger(__name__)

OnProgress = Callable[[str], None]
"""Takes the name of the case that is about to be timed."""

GoOn = Callable[[EncoderBenchmark], bool]
"""Takes what was measured so far; whether there is to be another case."""


@dataclass(frozen=True)
class BenchSettings:
    """How to time."""

    rounds: int = 30
    limit_s: float = 10.0
    """Most seconds per case, beyond three rounds."""
    in_tree: bool = True
    floor: bool = True


class EncoderTimer:
    """Times batches on one captured encoder.

    Args:
        manager: captured; its device decides what can be timed: without a GPU
            there are no graphs, in-tree or as a floor, and ours are replaced by
            running the captured forward again.
    """

    def __init__(
        self, manager: EncoderCudaGraphManager, settings: BenchSettings
    ) -> None:
        self.manager = manager
        self.settings = settings
        self._on_gpu = manager.device.type == "cuda"
        self._in_tree = self._capture_in_tree()
        self._sides: dict[float, int | None] = {}

    def _capture_in_tree(self) -> InTree | None:
        if not (self._on_gpu and self.settings.in_tree):
            return None
        try:
            return capture_in_tree(self.manager)
        except Exception as error:
            logger.warning(
                "vLLM's own manager is left out: %s: %s", type(error).__name__, error
            )
            return None

    def graph_costs(self) -> dict[str, GraphCost]:
        """By way."""
        stats = self.manager.get_cumulative_stats()
        limit_gib = self.manager.settings.memory_limit_gib
        costs = {
            OURS: GraphCost(
                stats["num_budgets"],
                stats["graph_memory_bytes"],
                stats["capture_seconds"],
                None if limit_gib is None else limit_gib * 2**30,
                stats["capture_phases"],
            )
        }
        if self._in_tree is not None:
            costs[IN_TREE] = GraphCost(
                self._in_tree.graphs, self._in_tree.memory_bytes, self._in_tree.seconds
            )
        return costs

    def time_case(self, case: BenchCase) -> CaseTimes:
        """All ways on one batch.

        Raises:
            ValueError: the adapter cannot read the batch, so no graph can hold it.
        """
        mm_kwargs = media_batch(self.manager.adapter, case.batch, seed=1)
        batch = self.manager.adapter.parse(mm_kwargs)
        if batch is None:
            raise ValueError(f"case {case.name!r}: this encoder takes no such input")
        calls: dict[str, Call] = {
            EAGER: self._eager(mm_kwargs),
            OURS: self._through(self.manager, mm_kwargs),
        }
        if self._in_tree is not None:
            calls[IN_TREE] = self._through(self._in_tree.manager, mm_kwargs)
        floor = None
        if self._on_gpu and self.settings.floor:
            floor = exact_shape_graphs(self.manager.adapter, batch)
        if floor is not None:
            calls[FLOOR] = floor[0]
        tokens = [spec.output_tokens for spec in batch.specs]
        times = time_in_turn(
            calls,
            self.manager.device,
            self.settings.rounds,
            limit_s=self.settings.limit_s,
        )
        row = summarize(case.name, len(tokens), sum(tokens), times)
        row.floor_kind = None if floor is None else floor[1]
        row.padding = self._padding(mm_kwargs, tokens)
        del floor, calls
        if self._on_gpu:
            torch.cuda.empty_cache()
        return row

    def _eager(self, mm_kwargs: dict[str, Any]) -> Call:
        @torch.inference_mode()
        def call() -> Any:
            return self.manager.model.embed_multimodal(**mm_kwargs)

        return call

    def _through(self, manager: Any, mm_kwargs: dict[str, Any]) -> Call:
        eager = self._eager(mm_kwargs)

        @torch.inference_mode()
        def call() -> Any:
            result = manager.execute(mm_kwargs)
            return result if result is not None else eager()

        return call

    def _padding(
        self, mm_kwargs: dict[str, Any], tokens: Sequence[int]
    ) -> dict[str, float]:
        """Ours as it was planned, and in-tree as the reference design packs."""
        seen: list[Plan] = []

        def observe(batch: EncoderBatch, plan: Plan, outputs: Any) -> None:
            seen.append(plan)

        before = self.manager.observer
        self.manager.observer = observe
        try:
            self._through(self.manager, mm_kwargs)()
        finally:
            self.manager.observer = before
        replays = [
            (step.tokens, self.manager.computed_tokens(step.key))
            for plan in seen
            for sub_batch in plan.sub_batches
            for step in sub_batch.steps.values()
            if step.key is not None
        ]
        padding = {OURS: _padded_share(replays)}
        if self._in_tree is not None and len(self.manager.config.paths) == 1:
            reference = self._in_tree.manager
            replays = pack_as_reference(
                tokens, sorted(reference.token_budgets), reference.max_batch_size
            )
            padding[IN_TREE] = _padded_share(replays)
        return padding

    def clear(self) -> None:
        """Gives back what was captured here."""
        self._in_tree = None
        if self._on_gpu:
            torch.cuda.empty_cache()

    def growth_case(self, items: int, tokens: int) -> BenchCase | None:
        """`items` equal images of about `tokens` output tokens together; None where
        this encoder gives no image so few or so many."""
        each = tokens / items
        if each not in self._sides:
            self._sides[each] = self._side_for(each)
        side = self._sides[each]
        if side is None:
            return None
        name = f"{items} x {side}x{side}"
        return BenchCase(name, images(*[(side, side)] * items))

    def _side_for(self, tokens: float) -> int | None:
        """Side, in pixels, of an image of about so many tokens."""
        low, high = 16, 16
        while self._tokens_of(high) < tokens:
            high *= 2
            if high > 8192:
                return None
        while high - low > 4:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self._tokens_of(middle) < tokens else (low, middle)
            )
        return high if abs(self._tokens_of(high) / tokens - 1) < 0.25 else None

    def _tokens_of(self, side: int) -> int:
        adapter = self.manager.adapter
        batch = adapter.parse(image_batch(adapter, [(side, side)], 0))
        return batch.specs[0].output_tokens if batch is not None else 2**31


def bench_encoder(
    manager: EncoderCudaGraphManager,
    cases: Sequence[BenchCase],
    settings: BenchSettings | None = None,
    *,
    growth: bool = False,
    on_progress: OnProgress = lambda name: None,
    go_on: GoOn = lambda benchmark: True,
) -> EncoderBenchmark:
    """Times all cases on a captured encoder.

    Args:
        growth: also over 1 to 64 items and 64 to 16384 tokens, as far as the
            largest budget goes.
        go_on: is asked before every case, and may keep what there is by then.
    """
    timer = EncoderTimer(manager, settings or BenchSettings())
    benchmark = EncoderBenchmark(describe(manager), timer.graph_costs())
    for case in cases:
        if not go_on(benchmark):
            break
        on_progress(case.name)
        benchmark.cases.append(timer.time_case(case))
    for items, tokens in growth_points(manager.largest_budget()) if growth else ():
        if not go_on(benchmark):
            break
        case_of_point = timer.growth_case(items, tokens)
        if case_of_point is not None:
            on_progress(f"growth: {case_of_point.name}")
            benchmark.growth.append(timer.time_case(case_of_point))
    timer.clear()
    return benchmark


def growth_points(largest: int) -> list[tuple[int, int]]:
    """(items, tokens) of the growth cases, up to `largest` tokens."""
    return [
        (items, tokens)
        for tokens in GROWTH_TOKENS
        if tokens <= largest
        for items in GROWTH_ITEMS
        if tokens >= 4 * items
    ]


def describe(manager: EncoderCudaGraphManager) -> dict[str, Any]:
    """What the records of one encoder have in common."""
    import vllm

    import vllm_encoder_cg

    device = manager.device
    return {
        "architecture": type(manager.model).__name__,
        "backend": manager.adapter.backend_name(),
        "captured": "fused forward" if manager.adapter.fused else "vLLM's forward",
        "device": (
            torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        ),
        "dtype": str(manager.dtype).removeprefix("torch."),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "vllm_encoder_cg": vllm_encoder_cg.__version__,
    }


def _padded_share(replays: Sequence[tuple[int, int]]) -> float:
    computed = sum(budget for _, budget in replays)
    real = sum(min(tokens, budget) for tokens, budget in replays)
    return (computed - real) / computed if computed else 0.0
