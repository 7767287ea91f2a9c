# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on the ranks of a tensor-parallel group, with toy encoders.

The functions run in processes of their own (``rank_processes.py``), all faults of
one run in one process, and return what the tests look at.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.support.rank_outcomes import Outcome, Rank
from vllm_encoder_cg.startup.self_check import Mismatch

TOY_ITEMS = [(0, 8), (3, 8), (1, 4), (9, 4), (2, 6), (0, 8), (5, 8)]
"""(parts, width); 6 has no graphs, and 9 parts are above every budget."""

UNEVEN = {
    "one item": [(3, 8)],
    "two items": [(3, 8), (1, 4)],
    "three items": [(0, 4), (7, 4), (1, 8)],
    "one huge, many small": [(1, 8), (7, 8), *[(0, 8)] * 6],
    "eagerly only": [(2, 6), (9, 6)],
    "one eagerly": [(2, 6)],
    "above every budget alone": [(20, 8)],
}
"""Batches that some of four ranks have nothing of, or nothing by graph."""


def toy_rank(size: int, mode: str, **changes: Any) -> Rank:
    """A manager of the toy on this rank, not captured yet.  In mode "weights" its
    forward adds up a part of every rank."""
    from tests.support.toy_adapter import (
        ToyAdapter,
        ToyModel,
        encode_eagerly,
        make_toy_config,
    )
    from vllm_encoder_cg.manager import EncoderCudaGraphManager

    class ShardedToy(ToyModel):
        @staticmethod
        def encode(rows: torch.Tensor) -> torch.Tensor:
            from vllm.distributed import tensor_model_parallel_all_reduce

            return tensor_model_parallel_all_reduce(ToyModel.encode(rows) / size)

    config = make_toy_config(encoder_cudagraph_token_budgets=[2, 4, 8])
    config.additional_config["encoder_cg"] |= changes
    config.parallel_config.tensor_parallel_size = size
    config.model_config.multimodal_config.mm_encoder_tp_mode = mode
    with mock.patch(
        "vllm_encoder_cg.manager.adapt",
        lambda model, vllm_config: (ToyAdapter(model, vllm_config), None),
    ):
        manager = EncoderCudaGraphManager(
            config,
            torch.device("cpu"),
            torch.float32,
            ToyModel() if mode == "data" else ShardedToy(),
        )
    return Rank(manager, encode_eagerly)


def run_toy(
    on_rank: Rank, seed: int = 0, items: list[tuple[int, int]] = TOY_ITEMS
) -> Outcome:
    """One batch."""
    from tests.support.toy_adapter import encode_eagerly, make_items

    mm_kwargs = make_items(*items, seed=seed)
    return on_rank.run(mm_kwargs, encode_eagerly(mm_kwargs))


@contextmanager
def raising(owner: Any, name: str, when: bool = True) -> Iterator[None]:
    """`owner.name` raises on the ranks for which `when` holds."""
    if not when:
        yield
        return
    with mock.patch.object(owner, name, side_effect=RuntimeError("out of luck")):
        yield


def faults_on_rank(
    rank: int, size: int, names: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """What a rank does unlike the others and survives.

    Args:
        names: keys of ``FAULTS``; None: all.
    """
    gc.freeze()  # vLLM's modules, which every dropped graph has collected again
    return {
        f"{mode}: {name}": FAULTS[name](rank, size, mode)
        for mode in ("data", "weights")
        for name in names or FAULTS
    }


def _last(rank: int, size: int) -> bool:
    return rank == size - 1


def _nothing(rank: int, size: int, mode: str) -> list[Outcome]:
    on_rank = toy_rank(size, mode)
    on_rank.manager.capture()
    return [run_toy(on_rank, seed) for seed in range(3)]


def _uneven(rank: int, size: int, mode: str) -> dict[str, Outcome]:
    on_rank = toy_rank(size, mode)
    on_rank.manager.capture()
    return {name: run_toy(on_rank, items=items) for name, items in UNEVEN.items()}


def _cannot_start(rank: int, size: int, mode: str) -> dict[str, Any]:
    from tests.support.toy_adapter import ToyAdapter

    with raising(ToyAdapter, "config", _last(rank, size)):
        on_rank = toy_rank(size, mode)
    on_rank.manager.capture()
    return {"reason": on_rank.manager.inactive_reason, "outcome": run_toy(on_rank)}


def _wrong_setting(rank: int, size: int, mode: str) -> str:
    """The first rank, which alone writes the trace, cannot."""
    try:
        on_rank = toy_rank(size, mode, trace_file="/no/such/folder/t.jsonl")
    except ValueError as error:
        return f"raised: {error}"
    return str(on_rank.manager.inactive_reason)


def _capture_fails(rank: int, size: int, mode: str) -> dict[str, Any]:
    on_rank = toy_rank(size, mode)
    adapter = on_rank.manager.adapter
    prepare = adapter.capture_buffers

    def fail_for_the_largest(shape: Any, arena: Any) -> Any:
        if _last(rank, size) and shape.key.token_budget == 8:
            raise MemoryError("no room")
        return prepare(shape, arena)

    with mock.patch.object(adapter, "capture_buffers", fail_for_the_largest):
        on_rank.manager.capture()
    return {
        "dropped": len(on_rank.manager.get_cumulative_stats()["dropped_graphs"]),
        "outcome": run_toy(on_rank),
    }


def _every_capture_fails(rank: int, size: int, mode: str) -> dict[str, Any]:
    on_rank = toy_rank(size, mode)
    with raising(on_rank.manager.adapter, "capture_buffers", _last(rank, size)):
        on_rank.manager.capture()
    return {
        "captured": on_rank.manager.is_captured(),
        "graphs": on_rank.manager.get_cumulative_stats()["num_budgets"],
        "outcome": run_toy(on_rank),
    }


def _check_fails(rank: int, size: int, mode: str) -> dict[str, Any]:
    from vllm_encoder_cg.startup import self_check

    on_rank = toy_rank(size, mode)
    compare_items = self_check.compare_items

    def differ(
        adapter: Any, key: Any, results: Any, references: Any
    ) -> Mismatch | None:
        if _last(rank, size) and key.token_budget == 2:
            return Mismatch(key, 0.5, 1e-3)
        return compare_items(adapter, key, results, references)

    with mock.patch.object(self_check, "compare_items", differ):
        on_rank.manager.capture()
    return {
        "dropped": len(on_rank.manager.get_cumulative_stats()["dropped_graphs"]),
        "outcome": run_toy(on_rank),
    }


def _check_stops_the_start(rank: int, size: int, mode: str) -> str:
    from vllm_encoder_cg.startup import self_check

    on_rank = toy_rank(size, mode, on_mismatch="raise")
    compare_items = self_check.compare_items

    def differ(
        adapter: Any, key: Any, results: Any, references: Any
    ) -> Mismatch | None:
        if _last(rank, size):
            return Mismatch(key, 0.5, 1e-3)
        return compare_items(adapter, key, results, references)

    with mock.patch.object(self_check, "compare_items", differ):
        try:
            on_rank.manager.capture()
        except RuntimeError as error:
            return str(error)
    return "started"


def _batch_fails(rank: int, size: int, mode: str) -> list[Outcome]:
    """On one rank where ranks are independent of each other, else on all."""
    on_rank = toy_rank(size, mode)
    on_rank.manager.capture()
    fails = mode == "weights" or rank == 0  # which has the items without graphs
    outcomes = []
    for name in ("parse", "assemble", "eager", "fill"):
        with raising(on_rank.manager.adapter, name, fails):
            outcomes.append(run_toy(on_rank))
        outcomes.append(run_toy(on_rank))
    return outcomes


def _counts(rank: int, size: int, mode: str) -> dict[str, int]:
    """Of a batch that fails, on one rank where it can, and of one that does not."""
    on_rank = toy_rank(size, mode)
    on_rank.manager.capture()
    with raising(on_rank.manager.adapter, "fill", mode == "weights" or rank == 0):
        run_toy(on_rank)
    run_toy(on_rank)
    stats = on_rank.manager.get_cumulative_stats()
    return {
        "items": stats["items"],
        "batches": stats["batches"],
        "failed": stats["misses_by_reason"]["failed"],
    }


def _wrong_shape(rank: int, size: int, mode: str) -> list[Outcome]:
    on_rank = toy_rank(size, mode)
    on_rank.manager.capture()
    adapter = on_rank.manager.adapter
    assemble = adapter.assemble

    def lose_a_row(*arguments: Any) -> list[torch.Tensor]:
        embeddings = assemble(*arguments)
        return [embeddings[0][1:], *embeddings[1:]]

    if mode == "data" and _last(rank, size):
        with mock.patch.object(adapter, "assemble", lose_a_row):
            return [run_toy(on_rank), run_toy(on_rank)]
    return [run_toy(on_rank), run_toy(on_rank)]


def _observer_fails(rank: int, size: int, mode: str) -> Outcome:
    on_rank = toy_rank(size, mode)
    on_rank.manager.capture()
    run_toy(on_rank)
    observe = on_rank.manager.observer

    def observe_and_raise(batch: Any, plan: Any, outputs: Any) -> None:
        assert observe is not None
        observe(batch, plan, outputs)
        raise OSError("disk full")

    on_rank.manager.observer = observe_and_raise
    return run_toy(on_rank)


def _stale_weights(rank: int, size: int, mode: str) -> list[Outcome]:
    """Replaced on one rank where ranks are independent of each other, else on all."""
    on_rank = toy_rank(size, mode)
    manager = on_rank.manager
    manager.capture()
    outcomes = [run_toy(on_rank)]
    replaced = mode == "weights" or _last(rank, size)
    name = "tower.weight" if replaced else None
    with mock.patch.object(manager._weights, "glance", lambda: name):
        outcomes.append(run_toy(on_rank))
        with mock.patch.object(manager.adapter, "parse", lambda mm_kwargs: None):
            outcomes.append(run_toy(on_rank))
        outcomes += [run_toy(on_rank, seed) for seed in range(2)]
    return outcomes


def _late(rank: int, size: int, mode: str) -> list[Outcome]:
    """The last rank begins every batch late, by more than a batch takes; the first
    fails in one of them, or all do where ranks depend on each other."""
    from vllm_encoder_cg.planning.sharding import PathRate

    on_rank = toy_rank(size, mode)
    manager = on_rank.manager
    manager.capture()
    # As measured on a GPU: a millisecond a token.
    rates = {path: PathRate(1.0, 0.0) for path in manager.config.paths}
    manager._executor._rates = rates
    outcomes = []
    for number in range(7):
        if _last(rank, size):
            time.sleep(0.2)
        fails = number == 1 and (mode == "weights" or rank == 0)
        with raising(manager.adapter, "assemble", fails):
            outcomes.append(run_toy(on_rank, number))
    return outcomes


FAULTS: dict[str, Callable[[int, int, str], Any]] = {
    "nothing": _nothing,
    "uneven": _uneven,
    "cannot start": _cannot_start,
    "wrong setting": _wrong_setting,
    "capture fails": _capture_fails,
    "every capture fails": _every_capture_fails,
    "check fails": _check_fails,
    "check stops the start": _check_stops_the_start,
    "batch fails": _batch_fails,
    "counts": _counts,
    "late": _late,
    "wrong shape": _wrong_shape,
    "observer fails": _observer_fails,
    "stale weights": _stale_weights,
}


def end_on_rank(rank: int, size: int, mode: str) -> str:
    """The last rank ends; what the others get to see."""
    import os

    on_rank = toy_rank(size, mode)
    on_rank.manager.capture()
    if _last(rank, size):
        with mock.patch.object(on_rank.manager.adapter, "parse", lambda _: os._exit(3)):
            run_toy(on_rank)
    try:
        run_toy(on_rank)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fail_out_of_step(rank: int, size: int) -> str:
    """A batch of a sharded encoder fails on the last rank only."""
    from vllm_encoder_cg import ranks

    on_rank = toy_rank(size, "weights")
    on_rank.manager.capture()
    with (
        mock.patch.object(ranks, "BATCH_TIMEOUT_S", 2.0),
        raising(on_rank.manager.adapter, "assemble", _last(rank, size)),
    ):
        try:
            run_toy(on_rank)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"
