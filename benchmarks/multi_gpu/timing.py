# SPDX-License-Identifier: Apache-2.0
"""Times an encoder on several ranks: eager, vLLM's in-tree manager, ours, and ours
with the in-tree manager's budgets.

The workload is the reference design's: 20 images of 336x336 per request, which
the processor scales to 352x352.  All ways take turns, every rank starts a request
at once, and its time is that of the slowest rank, as in ``vllm bench
mm-processor``.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.multi_gpu.on_ranks import run_encoders
from benchmarks.multi_gpu.results import Results, Row, TimeLimit
from benchmarks.multi_gpu.setup import (
    IN_TREE_GRAPHS,
    Encoder,
    built,
    capture,
    encode,
    synchronize,
    write_encoder,
)

Call = Callable[[], Any]


def time_encoders(
    encoders: list[Encoder],
    ranks: int,
    rounds: int,
    results: Results,
    limit: TimeLimit,
) -> None:
    """Per encoder a row per way, with mean and P99 in ms; after the first, those of
    the exchange's parts.

    Args:
        encoders: of one architecture and size.
    """
    with tempfile.TemporaryDirectory(prefix="multi-gpu-") as folder:
        checkpoint = write_encoder(encoders[0], ranks, Path(folder))
        run_encoders(
            "timing",
            time_on_rank,
            ranks,
            encoders,
            results,
            limit,
            checkpoint,
            rounds,
            encoders[0],
        )


def time_on_rank(
    rank: int,
    ranks: int,
    encoders: list[Encoder],
    results: Results,
    checkpoint: Path,
    rounds: int,
    with_exchange: Encoder,
) -> None:
    for encoder in encoders:
        with built(encoder, ranks, checkpoint) as manager:
            rows = _time_ways(manager, encoder, ranks, rounds)
            if encoder == with_exchange and ranks > 1:
                rows += _time_exchange(manager, rounds)
            for row in rows if rank == 0 else []:
                results.add({"part": "timing"} | row)


def _time_ways(manager: Any, encoder: Encoder, ranks: int, rounds: int) -> list[Row]:
    from vllm.platforms import current_platform

    from vllm_encoder_cg.samples.encoder_inputs import image_batch
    from vllm_encoder_cg.verification import verify_tolerance

    small = encoder.vision == "small"
    count, side = (4, 128) if small else (20, 352)
    capture(manager)
    mm_kwargs = image_batch(manager.adapter, [(side, side)] * count, seed=0)
    calls: dict[str, Call] = {
        "eager": lambda: manager.model.embed_multimodal(**mm_kwargs)
    }
    rows: list[Row] = []
    managers = {"ours, budgets of in-tree": type(manager)}
    if not current_platform.is_cpu():
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

        managers = {"in-tree": EncoderCudaGraphManager} | managers
    for way, manager_class in managers.items():
        other, problem = _with_budgets(manager, manager_class, encoder)
        if problem is None:
            calls[way] = partial(encode, other, mm_kwargs)
        else:
            what = {"encoder": str(encoder), "step": f"{encoder}, {way}"}
            rows.append(what | {"problems": [problem]})
    calls["ours"] = partial(encode, manager, mm_kwargs)
    errors = _compare(calls)
    tolerance = verify_tolerance(manager)
    for way, times in _time_in_turn(calls, manager._ranks, rounds).items():
        wrong = way.startswith("ours") and errors[way] > tolerance
        rows.append(
            {
                "encoder": str(encoder),
                "ranks": ranks,
                "way": way,
                "mean_ms": statistics.mean(times),
                "p99_ms": _p99(times),
                "requests": len(times),
                "error": errors[way],
                "problems": [f"differs by {errors[way]:.1e}"] if wrong else [],
            }
        )
    return rows


def _compare(calls: dict[str, Call]) -> dict[str, float]:
    """Largest relative norm, per item, of the difference from eager."""
    import torch

    from vllm_encoder_cg.startup.rounding import relative_norm

    with torch.inference_mode():
        references = calls["eager"]()
        return {
            way: max(map(relative_norm, call(), references))
            for way, call in calls.items()
        }


def _with_budgets(
    ours: Any, manager_class: Any, encoder: Encoder
) -> tuple[Any, str | None]:
    """A manager for the model of `ours`, captured with the reference design's
    budgets; and why there is none on a rank, if so."""
    fields = IN_TREE_GRAPHS[encoder.vision]
    manager = problem = None
    try:
        with _changed(ours.vllm_config.compilation_config, fields):
            manager = manager_class(
                ours.vllm_config, ours.device, ours.dtype, ours.model
            )
        capture(manager)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = [each for each in ours._ranks.everyone(problem) if each]
    return manager, problems[0] if problems else None


@contextmanager
def _changed(config: Any, fields: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(config, name) for name in fields}
    for name, value in fields.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _time_in_turn(
    calls: dict[str, Call], ranks: Any, rounds: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Milliseconds per request, of the slowest rank."""
    import torch

    own: dict[str, list[float]] = {way: [] for way in calls}
    with torch.inference_mode():
        for call in calls.values():
            for _ in range(warmup):
                call()
        gc.collect()
        gc.disable()
        for _ in range(rounds):
            for way, call in calls.items():
                synchronize()
                ranks.all(True)
                begin = time.perf_counter()
                call()
                synchronize()
                own[way].append((time.perf_counter() - begin) * 1e3)
        gc.enable()
    every = ranks.everyone(own)
    return {way: [max(t) for t in zip(*(o[way] for o in every))] for way in calls}  # noqa: B905


def _p99(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def _time_exchange(manager: Any, rounds: int) -> list[Row]:
    """The vote on the host, and both kinds of gather by how full the ranks are."""
    import torch

    ranks, width = manager._ranks, manager.config.out_hidden_size
    rows: list[Row] = [
        _exchange_row(ranks, "vote", lambda: ranks.vote(True, 0), rounds)
    ]
    total = 640 if manager.device.type == "cpu" else 2400
    shares = {
        "equal": [total // ranks.size] * ranks.size,
        "first twice the others": [2 * total // (ranks.size + 1)]
        + [total // (ranks.size + 1)] * (ranks.size - 1),
        "first alone": [total] + [0] * (ranks.size - 1),
    }
    for name, counts in shares.items():
        group = ranks.group
        padded = torch.zeros(
            (max(counts), width), dtype=manager.dtype, device=manager.device
        )
        own = padded[: counts[ranks.rank]]
        calls = {
            "all_gather": lambda group=group, rows=padded: group.all_gather(rows, 0)
        }
        if manager._gather.uneven_cost < float("inf"):
            calls["all_gatherv"] = lambda group=group, rows=own, counts=counts: (
                group.all_gatherv(rows, 0, counts)
            )
        for kind, call in calls.items():
            row = _exchange_row(ranks, f"{kind}, {name}", call, rounds)
            row["chosen"] = (kind == "all_gatherv") == manager._gather.is_uneven(counts)
            rows.append(row)
    return rows


def _exchange_row(ranks: Any, name: str, call: Call, rounds: int) -> Row:
    times = _time_in_turn({name: call}, ranks, rounds)[name]
    return {"exchange": name, "ranks": ranks.size, "us": statistics.median(times) * 1e3}
