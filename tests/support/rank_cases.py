# SPDX-License-Identifier: Apache-2.0
"""What each rank of a tensor-parallel group does for the tests of several ranks.

The functions run in processes of their own (``rank_processes.py``), all cases of
one run in one process, and return what the tests look at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.support.fused import fused
from tests.support.small_towers import small_deepseek_ocr
from vllm_encoder_cg.planning.planner import Plan
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.startup.self_check import Mismatch
from vllm_encoder_cg.verification_cases import MediaBatch, images, videos

if TYPE_CHECKING:
    from vllm_encoder_cg.manager import EncoderCudaGraphManager

QWEN3 = "Qwen3VLForConditionalGeneration"
INTERNVL = "InternVLChatModel"
STEP3 = "Step3VLForConditionalGeneration"

DEEPSEEK = "DeepseekOCRForCausalLM"

MAX_TOKENS = {QWEN3: 256, INTERNVL: 256, STEP3: 512, DEEPSEEK: 600}

BATCHES: dict[str, dict[str, MediaBatch]] = {
    QWEN3: {
        "one item": images((128, 128)),
        "two items": images((128, 96), (64, 160)),
        "five items": images(*((32 * i, 64) for i in range(1, 6))),
        "one huge, many small": images((480, 480), *[(64, 64)] * 6),
        "more than max items": images(*[(64, 64)] * 20),
        "videos": videos((4, 64, 64), (8, 64, 96), (2, 128, 128)),
        "above every budget": images((64, 64), (640, 640), (64, 96)),
        "eagerly only": images((640, 640)),
    },
    INTERNVL: {
        "one item": images((112, 112)),
        "unlike items": images((448, 336), (112, 112), (224, 336), (112, 112)),
        "videos": videos((3, 112, 112), (7, 112, 112)),
        "above every budget": videos((20, 112, 112), (2, 112, 112)),
    },
    STEP3: {
        "one item": images((504, 504)),
        "whole and cut": images((1008, 504), (504, 504), (504, 1008)),
        "above every budget": images((504, 504), (2016, 1008)),
    },
    DEEPSEEK: {
        "one item": images((640, 640)),
        "whole and cut": images((1280, 640), (640, 640)),
        "above every budget": images((640, 640), (2560, 1280)),
    },
}
"""By architecture; the sizes suit ``MAX_TOKENS``."""


@dataclass
class Outcome:
    """What became of one batch on one rank."""

    error: float | None
    """Largest relative norm of the difference from the result of a single rank;
    None: ``execute`` left the batch to the model."""
    replayed: int = 0
    """Items that this rank encoded by graph."""
    eager: int = 0
    """Likewise eagerly."""
    model_error: float = 0.0
    """Of what the model itself makes of the batch on these ranks."""


def compare(results: Any, references: Any) -> float:
    return max(relative_norm(a, b) for a, b in zip(results, references, strict=True))


class Rank:
    """One manager of one rank, and how its batches go."""

    def __init__(
        self, manager: EncoderCudaGraphManager, embed: Callable[[dict[str, Any]], Any]
    ) -> None:
        self.manager = manager
        self._embed = embed
        self._plans: list[Plan] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        manager.observer = lambda batch, plan, outputs: self._plans.append(plan)

    def run(self, mm_kwargs: dict[str, Any], references: Any) -> Outcome:
        """Encodes a batch as vLLM's runner does."""
        self._plans.clear()
        self.manager.poison_buffers()
        with torch.inference_mode():
            outputs = self.manager.execute(mm_kwargs)
            of_model = self._embed(mm_kwargs)
        outcome = Outcome(None, model_error=compare(of_model, references))
        if outputs is None:
            return outcome
        self._kept += [(output, output.clone()) for output in outputs]
        outcome.error = compare(outputs, references)
        for sub_batch in self._plans[-1].sub_batches:
            outcome.eager += len(sub_batch.eager_reasons)
            outcome.replayed += len(sub_batch.indices) - len(sub_batch.eager_reasons)
        return outcome

    def kept_outputs_changed(self) -> bool:
        """Whether a later batch changed what an earlier one returned."""
        return not all(torch.equal(output, copy) for output, copy in self._kept)


# -- Models of vLLM --------------------------------------------------------------


def write_references(rank: int, size: int, folder: str) -> None:
    """A checkpoint of every architecture, and as ``<architecture>.pt`` what the
    model makes of its batches on a single rank."""
    from vllm_encoder_cg.samples.checkpoints import write_checkpoint
    from vllm_encoder_cg.verification import eager_embeddings

    gc.freeze()  # vLLM's modules
    for architecture, batches in BATCHES.items():
        checkpoint = Path(folder) / architecture
        write_checkpoint(architecture, checkpoint)
        with built(checkpoint, size, "weights") as manager:
            given = {}
            for seed, (name, batch) in enumerate(batches.items()):
                mm_kwargs = _make_inputs(manager.adapter, batch, seed)
                given[name] = (mm_kwargs, eager_embeddings(manager.model, mm_kwargs))
        torch.save(given, Path(folder) / f"{architecture}.pt")


def _make_inputs(adapter: Any, batch: MediaBatch, seed: int) -> dict[str, Any]:
    from vllm_encoder_cg.samples.encoder_inputs import image_batch, video_batch

    if batch.modality == "video":
        clips = [(item.frames, item.width, item.height) for item in batch.items]
        return video_batch(adapter, clips, seed)
    return image_batch(adapter, [(i.width, i.height) for i in batch.items], seed)


def encode_on_rank(
    rank: int, size: int, folder: str, encoders: list[tuple[str, str]]
) -> dict[tuple[str, str, str], Outcome | bool]:
    """Every batch of every (architecture, mode), against ``write_references``."""
    outcomes: dict[tuple[str, str, str], Outcome | bool] = {}
    gc.freeze()  # vLLM's modules
    for architecture, mode in encoders:
        batches = torch.load(Path(folder) / f"{architecture}.pt", weights_only=False)
        with built(Path(folder) / architecture, size, mode) as manager:
            manager.capture()
            model = manager.model
            on_rank = Rank(manager, lambda kwargs: model.embed_multimodal(**kwargs))  # noqa: B023
            for name, (mm_kwargs, references) in batches.items():
                outcomes[architecture, mode, name] = on_rank.run(mm_kwargs, references)
            outcomes[architecture, mode, "changed"] = on_rank.kept_outputs_changed()
            if manager.adapter.fusion_refusal() is None:
                given = batches["videos"]
                with fused(manager.adapter):
                    outcomes[architecture, mode, "fused"] = on_rank.run(*given)
            if architecture == QWEN3:
                embeds = {"image_embeds": torch.zeros(4, 8)}
                given = on_rank.manager.execute(
                    embeds | {"image_grid_thw": torch.tensor([[1, 4, 4]])}
                )
                outcomes[architecture, mode, "embeddings taken"] = given is not None
        gc.collect()
    return outcomes


@contextmanager
def built(checkpoint: Path, size: int, mode: str) -> Iterator[EncoderCudaGraphManager]:
    """A small encoder of vLLM on this rank, not captured yet."""
    from vllm.config import set_current_vllm_config

    from vllm_encoder_cg.manager import EncoderCudaGraphManager
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs
    from vllm_encoder_cg.samples.model_builder import build_model, make_vllm_config

    engine_args = engine_kwargs(checkpoint.name)
    del engine_args["max_model_len"], engine_args["limit_mm_per_prompt"]
    vllm_config = make_vllm_config(
        **engine_args | {"dtype": "float32"},
        model=checkpoint,
        max_tokens=MAX_TOKENS[checkpoint.name],
        settings={"max_graphs": 6, "cost_model": False},
        tensor_parallel_size=size,
        mm_encoder_tp_mode=mode,
    )
    with small_deepseek_ocr(), set_current_vllm_config(vllm_config):
        yield EncoderCudaGraphManager(
            vllm_config, torch.device("cpu"), torch.float32, build_model(vllm_config)
        )


# -- Toy encoders, for what goes wrong ------------------------------------------

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

    def differ(key: Any, results: Any, references: Any) -> Mismatch | None:
        if _last(rank, size) and key.token_budget == 2:
            return Mismatch(key, 0.5, 1e-3)
        return compare_items(key, results, references)

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

    def differ(key: Any, results: Any, references: Any) -> Mismatch | None:
        if _last(rank, size):
            return Mismatch(key, 0.5, 1e-3)
        return compare_items(key, results, references)

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
