# SPDX-License-Identifier: Apache-2.0
"""Times fused forwards against vLLM's on a GPU, and checks them.

    python benchmarks/fused_forward.py --out DIR [ARCHITECTURE[:BACKEND] ...]

Per encoder (released configuration, random weights of a real scale, BF16):

- every case through a manager that captured vLLM's forward ("plain") and one that
  captured the fused forward ("fused"), next to the floor (a graph of vLLM's forward
  for exactly the batch) and a graph of the fused forward for exactly the batch;
- the error of eager and of the fused graph against the same tower in float64;
- the kernels of the floor and of the fused graph, by name and by kind;
- with ``--steps``, the fused graph without each of its steps.

Before that, every kernel against its plain reference over shapes and dtypes.  DIR
receives fused.json with all of it; a short table comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

    from vllm_encoder_cg.adapter import EncoderBatch, GraphShape
    from vllm_encoder_cg.manager import EncoderCudaGraphManager

_PROFILED_CASES = ("1 x 224x224", "1 x 640x480", "1 x 1024x1024")
_ERROR_CASES = ("1 x 224x224", "4 x 336x336")
_PROFILED_REPLAYS = 10

_KINDS = (
    ("rotary, q k v", ("rotate", "rotary")),
    ("residual, norm", ("add_norm", "layer_norm", "layernorm", "rms_norm", "rms")),
    ("scheduling", ("prepare_varlen",)),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("product", ("gemm", "nvjet", "cutlass", "gemv", "splitk", "cublas", "sm90_xmma")),
    ("activation", ("gelu", "activate", "silu", "act_and_mul", "sigmoid")),
    ("copy, fill", ("copy", "memcpy", "memset", "fill", "cat")),
)
"""What a part of a kernel's name says of it; the first that fits."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "encoders", nargs="*", default=["Qwen3VLForConditionalGeneration:FLASH_ATTN"]
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--vision", default="released", choices=("released", "small"))
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--no-kernel-check", action="store_true")
    args = parser.parse_args()
    # Nothing is fetched; a kernel of vLLM's needs the second with Triton 3.6.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"kernels": [], "encoders": []}
    if not args.no_kernel_check:
        report["kernels"] = check_kernels()
        _print_kernel_check(report["kernels"])
    for encoder in args.encoders:
        architecture, _, backend = encoder.partition(":")
        try:
            found = run(architecture, backend or "FLASH_ATTN", args)
        except Exception as error:
            traceback.print_exc()
            found = {"encoder": encoder, "failed": f"{type(error).__name__}: {error}"}
        report["encoders"].append(found)
        (args.out / "fused.json").write_text(json.dumps(report, indent=1))
        _print_details(found)
    print(_overview(report["encoders"]), flush=True)
    if any("failed" in found for found in report["encoders"]):
        raise SystemExit(1)


# -- One encoder -----------------------------------------------------------------


def run(architecture: str, backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one encoder, as flat data."""
    import torch

    from vllm_encoder_cg.benchmarking.cases import STANDARD_CASES
    from vllm_encoder_cg.samples.architectures import ARCHITECTURES
    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )

    limits = {"image": 32, "video": 1}
    options = EncoderOptions(
        architecture=architecture,
        vision=args.vision,
        backend=backend,
        dtype="bfloat16",
        max_tokens=args.max_tokens,
        settings={"fused": "off"},
        engine={
            "limit_mm_per_prompt": {
                m: limits[m] for m in ARCHITECTURES[architecture].modalities
            }
        },
    )
    from vllm_encoder_cg.models.fused import short_rows

    short_rows._known.clear()
    found: dict[str, Any] = {"encoder": f"{architecture}:{backend}"}
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
            case.name: _images(plain, case.batch.items) for case in STANDARD_CASES
        }
        found["errors"] = {}
        for name in _ERROR_CASES if backend == "FLASH_ATTN" else ():
            try:
                found["errors"][name] = _errors(fused, batches[name])
            except Exception:  # an operation of vLLM's without float64
                traceback.print_exc()
        found["cases"] = [
            _time_case(name, plain, fused, mm_kwargs, args.rounds)
            for name, mm_kwargs in batches.items()
        ]
        found["profiles"] = {
            name: _profiles(fused, batches[name]) for name in _PROFILED_CASES
        }
        if args.steps:
            found["steps"] = {
                name: _time_steps(fused, batches[name], args.rounds)
                for name in _PROFILED_CASES
            }
        fused.clear()
        plain.clear()
    torch.cuda.empty_cache()
    return found


def _capture_fused(plain: EncoderCudaGraphManager) -> EncoderCudaGraphManager:
    """A second manager of the same model, whose graphs hold the fused forward."""
    manager = _manager_like(plain, "on")
    manager.capture()
    if not manager.adapter.fused:
        raise RuntimeError(manager.adapter.fusion_refusal() or "it is not fused")
    return manager


def _manager_like(plain: EncoderCudaGraphManager, fused: str) -> Any:
    from vllm_encoder_cg.manager import EncoderCudaGraphManager

    config = plain.vllm_config
    before = config.additional_config
    config.additional_config = {"encoder_cg": {"fused": fused}}
    try:
        return EncoderCudaGraphManager(config, plain.device, plain.dtype, plain.model)
    finally:
        config.additional_config = before


def _auto_choice(plain: EncoderCudaGraphManager) -> dict[str, Any]:
    """What ``fused: "auto"`` comes to, and how long that takes."""
    import time

    from vllm_encoder_cg.forward_choice import choose_forward

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


def _images(manager: EncoderCudaGraphManager, items: Any) -> dict[str, Any]:
    from vllm_encoder_cg.samples.encoder_inputs import image_batch

    sizes = [(item.width, item.height) for item in items]
    return image_batch(manager.adapter, sizes, seed=1)


def _time_case(
    name: str,
    plain: EncoderCudaGraphManager,
    fused: EncoderCudaGraphManager,
    mm_kwargs: dict[str, Any],
    rounds: int,
) -> dict[str, Any]:
    import torch

    from vllm_encoder_cg.benchmarking.floor import exact_shape_graphs
    from vllm_encoder_cg.benchmarking.timing import time_in_turn

    batch = plain.adapter.parse(mm_kwargs)
    assert batch is not None
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: _execute(plain, mm_kwargs),
        "fused": lambda: _execute(fused, mm_kwargs),
    }
    floor = exact_shape_graphs(plain.adapter, batch)
    kind = None
    if floor is not None:
        calls["floor"], kind = floor
    exact = _exact_graph(fused, mm_kwargs)
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


def _execute(manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]) -> Any:
    import torch

    with torch.inference_mode():
        result = manager.execute(mm_kwargs)
        if result is None:
            result = manager.model.embed_multimodal(**mm_kwargs)
    return result


def _exact_inputs(
    manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> tuple[EncoderBatch, GraphShape, dict[str, torch.Tensor]]:
    """A batch in buffers that it fills exactly."""
    import torch

    from vllm_encoder_cg.adapter import GraphShape
    from vllm_encoder_cg.definitions import BatchLimits, GraphKey

    adapter = manager.adapter
    batch = adapter.parse(mm_kwargs)
    assert batch is not None
    tokens = sum(spec.output_tokens for spec in batch.specs)
    key = GraphKey(next(iter(manager.config.paths)), tokens)
    items = len(batch.specs)
    shape = GraphShape(key, adapter.capacity(key, BatchLimits(items, items)))
    buffers = {
        name: torch.zeros(spec.shape, dtype=spec.dtype, device=manager.device)
        for name, spec in adapter.buffer_specs(shape).items()
    }
    adapter.fill(batch, range(items), buffers, shape)
    return batch, shape, buffers


@dataclass
class ExactGraph:
    """A graph of the fused forward for exactly one batch; a call replays it."""

    graph: torch.cuda.CUDAGraph
    buffers: dict[str, torch.Tensor]
    output: torch.Tensor

    def __call__(self) -> None:
        self.graph.replay()


def _exact_graph(
    manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> ExactGraph:
    import torch

    _, shape, buffers = _exact_inputs(manager, mm_kwargs)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(2):
            manager.adapter.forward(buffers, shape)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            output = manager.adapter.forward(buffers, shape)
    torch.cuda.synchronize()
    return ExactGraph(graph, buffers, output)


# -- Errors ----------------------------------------------------------------------


def _errors(
    fused: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> dict[str, float]:
    """Relative norms of the difference from the tower in float64."""
    import torch

    from vllm_encoder_cg.self_check import relative_norm

    batch, shape, buffers = _exact_inputs(fused, mm_kwargs)
    tokens = sum(spec.output_tokens for spec in batch.specs)
    with torch.inference_mode():
        eager = fused.adapter.eager(batch, range(len(batch.specs)), shape.key.path)
        graph = torch.cat(list(_execute(fused, mm_kwargs)))
    with _float64(fused), torch.inference_mode():
        exact = fused.adapter.forward(buffers, shape)[:tokens]
        torch.cuda.synchronize()
    return {
        "eager": relative_norm(eager.double(), exact),
        "fused": relative_norm(graph.double(), exact),
    }


@contextlib.contextmanager
def _float64(manager: EncoderCudaGraphManager) -> Iterator[None]:
    """The tower's weights as float64, and plain operations in place of kernels."""
    from vllm_encoder_cg import kernels
    from vllm_encoder_cg.models.fused.attention import Attend

    modules = [manager.adapter.tower]  # type: ignore[attr-defined]
    for name in ("resampler_model", "multi_modal_projector", "mlp1"):
        if hasattr(manager.model, name):
            modules.append(getattr(manager.model, name))
    tensors = [
        tensor
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.is_floating_point()
    ]
    before = [tensor.data for tensor in tensors]
    norm = getattr(modules[0], "input_norm", None)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(kernels, "is_available", lambda device: False))
        enter(mock.patch.object(Attend, "__call__", _exact_attention))
        if norm is not None:
            enter(mock.patch.object(norm, "forward", _normalise_wide(norm.forward)))
        for tensor in tensors:
            tensor.data = tensor.data.double()
        try:
            yield
        finally:
            for tensor, data in zip(tensors, before, strict=True):
                tensor.data = data


def _normalise_wide(forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return lambda x, dtype: forward(x, torch.float32).to(dtype)


def _exact_attention(attend: Any, layer: Any, q: Any, k: Any, v: Any) -> Any:
    """``Attend.__call__`` on any dtype."""
    import torch
    import torch.nn.functional as F

    output = torch.zeros_like(q)
    starts = attend.starts.tolist()
    for begin, end in itertools.pairwise(starts):
        if end > begin:
            parts = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
            inside = F.scaled_dot_product_attention(
                parts[0], parts[1], parts[2], scale=layer.scale
            )
            output[begin:end] = inside[0].transpose(0, 1)
    return output.flatten(1)


# -- Kernels of a replay -----------------------------------------------------------


def _profiles(
    fused: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Kernels per replay of the floor and of the fused graph."""
    from vllm_encoder_cg.benchmarking.floor import exact_shape_graphs

    batch = fused.adapter.parse(mm_kwargs)
    assert batch is not None
    profiles = {}
    floor = exact_shape_graphs(fused.adapter, batch)
    if floor is not None:
        profiles["floor"] = _profile(floor[0])
    profiles["fused"] = _profile(_exact_graph(fused, mm_kwargs))
    return profiles


def _profile(replay: Callable[[], Any]) -> list[dict[str, Any]]:
    """Name, launches and microseconds of each kernel, per replay."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED_REPLAYS):
            replay()
        torch.cuda.synchronize()
    rows = [
        {
            "kernel": event.key,
            "kind": _kind(event.key),
            "launches": event.count / _PROFILED_REPLAYS,
            "us": event.self_device_time_total / _PROFILED_REPLAYS,
        }
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _kind(name: str) -> str:
    lowered = name.lower()
    for kind, parts in _KINDS:
        if any(part in lowered for part in parts):
            return kind
    return "other"


# -- Steps -------------------------------------------------------------------------


def _time_steps(
    fused: EncoderCudaGraphManager, mm_kwargs: dict[str, Any], rounds: int
) -> dict[str, float]:
    """Milliseconds of the fused graph for exactly this batch, whole and with one
    thing changed."""
    from vllm_encoder_cg.benchmarking.timing import time_in_turn
    from vllm_encoder_cg.models.fused import modules
    from vllm_encoder_cg.models.fused.alongside import Alongside
    from vllm_encoder_cg.models.fused.attention import Attend
    from vllm_encoder_cg.models.fused.windows import WindowAttention
    from vllm_encoder_cg.self_check import relative_norm

    changes: dict[str, list[Any]] = {
        "all": [],
        "activation in a kernel of its own": [
            mock.patch.object(modules, "is_plain", lambda module: False)
        ],
        "norms and additions apart": [
            mock.patch.object(modules.Norm, "add", _add_and_norm_apart)
        ],
        "attention through vLLM's layer": [mock.patch.object(Attend, "direct", False)],
        "nothing alongside": [mock.patch.object(Alongside, "run", _run_in_line)],
        "windows not in one tile": [
            mock.patch.object(WindowAttention, "direct_windows", False)
        ],
        "no short attention": [mock.patch.object(Attend, "short_rows", 0)],
        "short attention up to 2048 rows": [
            mock.patch.object(Attend, "short_rows", 2048)
        ],
        "FlashAttention chooses its splits": [mock.patch.object(Attend, "splits", 0)],
    }
    calls: dict[str, ExactGraph] = {}
    for name, patches in changes.items():
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            try:
                calls[name] = _exact_graph(fused, mm_kwargs)
            except Exception as error:
                print(f"step {name!r}: {type(error).__name__}: {error}", flush=True)
    for name, graph in calls.items():
        graph()
        difference = relative_norm(graph.output, calls["all"].output)
        if not difference < 1e-2:
            print(f"step {name!r}: WRONG, differs by {difference:.1e}", flush=True)
    times = time_in_turn(calls, fused.device, rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def _run_in_line(alongside: Any, call: Callable[..., Any], x: Any) -> Any:
    return call(x)


def _add_and_norm_apart(norm: Any, x: Any, delta: Any, scale: Any = None) -> Any:
    from vllm_encoder_cg.models.fused.modules import add_residual

    total = x if delta is None else add_residual(x, delta, scale)
    return total, norm._module(total)


# -- Every kernel against its reference ----------------------------------------------


def check_kernels() -> list[dict[str, Any]]:
    """Largest difference of each kernel from its plain reference, relative to the
    reference's norm, per dtype and over shapes."""
    import torch

    from vllm_encoder_cg.kernels import checks

    return checks.compare_all(torch.device("cuda"))


def _print_kernel_check(rows: list[dict[str, Any]]) -> None:
    worst: dict[tuple[str, str], tuple[float, int, bool]] = {}
    for row in rows:
        key = row["kernel"], row["dtype"]
        error, count, ok = worst.get(key, (0.0, 0, True))
        worst[key] = max(error, row["error"]), count + 1, ok and row["ok"]
    for (kernel, dtype), (error, count, ok) in worst.items():
        mark = "ok" if ok else "WRONG"
        print(f"{kernel} {dtype}: {count} shapes, {error:.1e} at most, {mark}")


# -- Tables --------------------------------------------------------------------------


def _print_details(found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{found['encoder']}: FAILED, {found['failed']}", flush=True)
        return
    print(
        f"\n{found['encoder']}: {found['graphs']}, auto: {found['auto']}, "
        f"one kernel attends up to {found['short_rows']} rows"
    )
    for name, profiles in found["profiles"].items():
        for way, rows in profiles.items():
            total = sum(row["us"] for row in rows)
            launches = sum(row["launches"] for row in rows)
            kinds: dict[str, list[float]] = {}
            for row in rows:
                kind = kinds.setdefault(row["kind"], [0.0, 0.0])
                kind[0] += row["launches"]
                kind[1] += row["us"]
            parts = ", ".join(
                f"{kind} {us:.0f} us ({count:.0f})"
                for kind, (count, us) in sorted(kinds.items(), key=lambda k: -k[1][1])
            )
            print(f"{name}, {way}: {total:.0f} us in {launches:.0f} launches: {parts}")
    for name, steps in found.get("steps", {}).items():
        parts = ", ".join(f"{step}: {ms:.3f} ms" for step, ms in steps.items())
        print(f"{name}, steps: {parts}")
    for name, errors in found["errors"].items():
        parts = ", ".join(f"{way} {error:.2e}" for way, error in errors.items())
        print(f"{name}, error against float64: {parts}")
    print(flush=True)


def _overview(encoders: list[dict[str, Any]]) -> str:
    names = ("encoder, case", "tokens", *_WAYS, *(f"{a} / {b}" for a, b in _RATIOS))
    lines = [f"| {' | '.join(names)} |", f"|---{'|---:' * (len(names) - 1)}|"]
    for found in encoders:
        if "failed" in found:
            lines.append(f"| {found['encoder']} | {found['failed'][:80]} |")
            continue
        ratios: dict[str, list[float]] = {}
        for row in found["cases"]:
            ms = row["median_ms"]
            cells = [f"{ms[w]:.2f}" if w in ms else "" for w in _WAYS]
            for first, second in _RATIOS:
                ratio = ms[first] / ms[second] if second in ms else float("nan")
                ratios.setdefault(f"{first}/{second}", []).append(ratio)
                cells.append(f"{ratio:.3f}")
            lines.append(f"| {row['case']} | {row['tokens']} | {' | '.join(cells)} |")
        means = [
            f"{statistics.geometric_mean(values):.3f}" for values in ratios.values()
        ]
        lines.append(
            f"| {found['encoder']}, mean |  |  |  |  |  | {' | '.join(means)} |"
        )
    return "\n".join(lines)


_WAYS = ("plain", "fused", "floor", "fused exact")
_RATIOS = (("fused", "plain"), ("fused", "floor"), ("fused exact", "floor"))


if __name__ == "__main__":
    main()
