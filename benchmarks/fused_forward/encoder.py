# SPDX-License-Identifier: Apache-2.0
"""Everything that is measured of one encoder."""

from __future__ import annotations

import statistics
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.fused_forward.errors import errors_against_float64
from benchmarks.fused_forward.graphs import exact_graph, execute
from benchmarks.fused_forward.profiles import profiles
from benchmarks.fused_forward.steps import time_steps
from vllm_encoder_cg.benchmarking.cases import STANDARD_CASES
from vllm_encoder_cg.benchmarking.floor import exact_shape_graphs
from vllm_encoder_cg.benchmarking.scripts import Attempts
from vllm_encoder_cg.benchmarking.timing import time_in_turn
from vllm_encoder_cg.kernels import short_rows
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.architectures import ARCHITECTURES
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.samples.encoder_inputs import media_batch
from vllm_encoder_cg.startup.forward_choice import choose_forward

_PROFILED_CASES = ("1 x 224x224", "1 x 640x480", "1 x 1024x1024")
_ERROR_CASES = ("1 x 224x224", "4 x 336x336")


def run(
    found: dict[str, Any], args: Namespace, attempts: Attempts, save: Callable[[], None]
) -> None:
    """Everything about the encoder that ``found["encoder"]`` names, as flat data in
    `found`; what fails of it is told, and the rest goes on."""
    architecture, _, backend = found["encoder"].partition(":")
    backend = backend or "FLASH_ATTN"
    on_gpu = torch.cuda.is_available()
    limits = {"image": 32, "video": 1}
    options = EncoderOptions(
        architecture=architecture,
        vision=args.vision,
        backend=backend if on_gpu else None,
        dtype="bfloat16" if on_gpu else "float32",
        max_tokens=args.max_tokens,
        settings={"fused": "off"} | args.settings,
        engine={
            "limit_mm_per_prompt": {
                m: limits[m] for m in ARCHITECTURES[architecture].modalities
            }
        },
    )

    short_rows._known.clear()
    with captured_encoder(options) as plain:
        fused = _capture_fused(plain)
        found["graphs"] = {
            way: {
                name: manager.get_cumulative_stats()[name]
                for name in ("num_budgets", "graph_memory_bytes", "capture_seconds")
            }
            | {"dropped": len(manager.get_cumulative_stats()["dropped_graphs"])}
            for way, manager in (("plain", plain), ("fused", fused))
        }
        found["auto"] = _auto_choice(plain)
        # Per heads, head size, dtype and device.
        found["short_rows"] = list(short_rows._known.values())
        batches = {
            case.name: media_batch(plain.adapter, case.batch, seed=1)
            for case in STANDARD_CASES
        }
        for name, mm_kwargs in batches.items():
            row = attempts.run(
                f"{architecture}, {name}",
                lambda n=name, b=mm_kwargs: _time_case(n, plain, fused, b, args.rounds),  # type: ignore[misc]
            )
            if row is not None:
                found["cases"].append(row)
                save()
        parts: list[tuple[str, Sequence[str], Callable[[Any], Any]]] = [
            (
                "errors",
                _ERROR_CASES if backend == "FLASH_ATTN" else (),
                lambda batch: _errors(fused, batch),
            ),
            ("profiles", _PROFILED_CASES, lambda batch: profiles(fused, batch)),
            (
                "steps",
                _PROFILED_CASES if args.steps else (),
                lambda batch: time_steps(fused, batch, args.rounds),
            ),
        ]
        for part, names, measure in parts:
            found[part] = {}
            for name in names:
                result = attempts.run(
                    f"{architecture}, {name}, {part}",
                    lambda m=measure, n=name: m(batches[n]),  # type: ignore[misc]
                )
                if result is not None:
                    found[part][name] = result
                    save()
        fused.clear()
        plain.clear()


def _errors(fused: EncoderCudaGraphManager, batch: dict[str, Any]) -> Any:
    """None, and no problem, where an operation of vLLM's knows no float64."""
    try:
        return errors_against_float64(fused, batch)
    except Exception:
        traceback.print_exc()
        return None


def _capture_fused(plain: EncoderCudaGraphManager) -> EncoderCudaGraphManager:
    """A second manager of the same model, whose graphs hold the fused forward."""
    manager = _manager_like(plain, "on")
    manager.capture()
    if not manager.adapter.fused:
        raise RuntimeError(manager.adapter.fusion_refusal() or "it is not fused")
    return manager


def _manager_like(plain: EncoderCudaGraphManager, fused: str) -> Any:
    config = plain.vllm_config
    before = config.additional_config
    settings = before["encoder_cg"] | {"fused": fused}
    config.additional_config = {"encoder_cg": settings}
    try:
        return EncoderCudaGraphManager(config, plain.device, plain.dtype, plain.model)
    finally:
        config.additional_config = before


def _auto_choice(plain: EncoderCudaGraphManager) -> dict[str, Any]:
    """What ``fused: "auto"`` comes to, and how long that takes."""
    manager = _manager_like(plain, "auto")
    begin = time.perf_counter()
    choose_forward(
        manager.adapter,
        manager._shapes,
        manager.budgets.limits,
        manager.device,
        manager._ranks,
        "auto",
    )
    return {"fused": manager.adapter.fused, "seconds": time.perf_counter() - begin}


def _time_case(
    name: str,
    plain: EncoderCudaGraphManager,
    fused: EncoderCudaGraphManager,
    mm_kwargs: dict[str, Any],
    rounds: int,
) -> dict[str, Any]:
    batch = plain.adapter.parse(mm_kwargs)
    assert batch is not None
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: execute(plain, mm_kwargs),
        "fused": lambda: execute(fused, mm_kwargs),
    }
    floor = exact_shape_graphs(plain.adapter, batch)
    kind = None
    if floor is not None:
        calls["floor"], kind = floor
    exact = exact_graph(fused, mm_kwargs)
    calls["fused exact"] = exact
    times = time_in_turn(calls, plain.device, rounds)
    median = {way: statistics.median(values) for way, values in times.items()}
    del calls, floor, exact
    torch.cuda.empty_cache()
    return {
        "case": name,
        "tokens": sum(spec.output_tokens for spec in batch.specs),
        "floor_of": kind,
        "median_ms": median,
    }
