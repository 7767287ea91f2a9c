# SPDX-License-Identifier: Apache-2.0
"""Chooses which of a model's forwards is captured: vLLM's modules, or a fused one.

Fusing saves launches and trips to memory, but what it replaces is tuned as well, so
that it is measured, on this GPU and with this model, before it is used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, GraphShape
from vllm_encoder_cg.definitions import BatchLimits, GraphKey
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.ranks import EncoderRanks, OutOfStepError
from vllm_encoder_cg.startup.capture import capture_graphs
from vllm_encoder_cg.startup.self_check import NoSampleInputError, check_graphs

logger = init_logger(__name__)

_LARGEST_TOKENS = 2048
"""Of a measured graph; what is larger behaves alike and takes more memory."""
_ROUNDS = 8
_SLOWEST = 1.02
"""By how much the fused forward may be slower in one of the graphs."""


def choose_forward(
    adapter: EncoderAdapter,
    shapes: Sequence[GraphShape],
    limits: BatchLimits,
    device: torch.device,
    ranks: EncoderRanks,
    setting: str,
) -> None:
    """Sets ``adapter.fused`` before capture, alike on all ranks, which call this
    together.

    Args:
        shapes: all graphs that are going to be captured.
        setting: ``"on"``, ``"off"``, or ``"auto"``: fused where it is faster in a
            small, a middle and a large graph taken together, much slower in none,
            and right in all.

    Raises:
        OutOfStepError: a forward of a sharded encoder failed on some ranks only.
    """
    adapter.fused = False
    if setting == "off" or (setting == "auto" and device.type != "cuda"):
        return
    reasons = [each for each in ranks.everyone(adapter.fusion_refusal()) if each]
    if reasons:
        log = logger.warning if setting == "on" else logger.info
        log("The encoder is captured as vLLM runs it, not fused: %s", reasons[0])
        return
    if setting == "on":
        adapter.fused = True
        return
    ratios = _compare(adapter, _few(shapes), limits, device, ranks)
    adapter.fused = (
        bool(ratios)
        and max(ratios.values()) <= _SLOWEST
        and statistics.geometric_mean(ratios.values()) < 1.0
    )
    logger.info(
        "The encoder is captured %s; time of the fused forward against vLLM's: %s",
        "fused" if adapter.fused else "as vLLM runs it",
        ", ".join(f"{ratio:.3f} ({key})" for key, ratio in ratios.items())
        or "not to be measured",
    )


def _few(shapes: Sequence[GraphShape]) -> list[GraphShape]:
    """A large, a middle and a small one, of the first group."""
    first = shapes[0].key.group
    alike = sorted(
        (shape for shape in shapes if shape.key.group == first),
        key=lambda shape: shape.key.token_budget,
    )
    below = [s for s in alike if s.key.token_budget <= _LARGEST_TOKENS] or alike[:1]
    middle = math.sqrt(below[0].key.token_budget * below[-1].key.token_budget)
    chosen = {
        shape.key: shape
        for shape in (
            below[-1],
            min(below, key=lambda shape: abs(shape.key.token_budget - middle)),
            below[0],
        )
    }
    return list(chosen.values())


def _compare(
    adapter: EncoderAdapter,
    shapes: Sequence[GraphShape],
    limits: BatchLimits,
    device: torch.device,
    ranks: EncoderRanks,
) -> dict[GraphKey, float]:
    """Per graph the time of the fused replay by that of the plain one, as the first
    rank sees it; empty: fused graphs failed on a rank, or there is nothing to compare
    on."""
    ratios: dict[GraphKey, float] = {}
    try:
        for shape in shapes:
            ratio = _compare_one(adapter, shape, limits, device, ranks)
            if ratio is None:
                break
            ratios[shape.key] = ratio
    except OutOfStepError:
        raise
    except Exception:
        logger.warning("The fused forward cannot be measured", exc_info=True)
    right = ranks.all(len(ratios) == len(shapes))
    return ranks.from_first(ratios) if right else {}


def _compare_one(
    adapter: EncoderAdapter,
    shape: GraphShape,
    limits: BatchLimits,
    device: torch.device,
    ranks: EncoderRanks,
) -> float | None:
    """The ratio of one graph; None: the fused forward is not to be used."""
    sets: dict[bool, GraphSet] = {}
    for fused in (False, True):
        adapter.fused = fused
        sets[fused] = capture_graphs(adapter, [shape], limits, device, None, ranks)
    key = shape.key
    if any(key not in graphs.graphs for graphs in sets.values()):
        return None
    try:
        mismatches = check_graphs(adapter, sets[True], ranks)
    except NoSampleInputError:
        return None
    for mismatch in mismatches:
        logger.warning(
            "The fused forward differs from eager by %.2e (%s) and is not used",
            mismatch.error,
            mismatch.key,
        )
    if mismatches:
        return None
    for graphs in sets.values():
        _fill_with_sample(graphs, key, adapter)
    fused_graph, plain_graph = (sets[way].graphs[key].graph for way in (True, False))
    return _ratio(fused_graph.replay, plain_graph.replay)


def _fill_with_sample(graphs: GraphSet, key: GraphKey, adapter: EncoderAdapter) -> None:
    """Makes a graph ready for a full replay of its own: the check ends with one item
    alone."""
    shape = graphs.shapes[key]
    mm_kwargs = adapter.cost_sample(shape)
    batch = None if mm_kwargs is None else adapter.parse(mm_kwargs)
    # The check before this one found samples for every graph.
    assert batch is not None
    indices = range(len(batch.specs))
    adapter.fill(batch, indices, graphs.graphs[key].input_buffers, shape)


def _ratio(first: Callable[[], None], second: Callable[[], None]) -> float:
    """Median time of the first call by that of the second, taken in turn."""
    times: dict[Callable[[], None], list[float]] = {first: [], second: []}
    for round_ in range(_ROUNDS):
        for call in (first, second) if round_ % 2 else (second, first):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times[call].append(time.perf_counter() - begin)
    # The first two rounds warm up.
    return statistics.median(times[first][2:]) / statistics.median(times[second][2:])
