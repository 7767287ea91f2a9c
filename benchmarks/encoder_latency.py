# SPDX-License-Identifier: Apache-2.0
"""Times encoders on a GPU four ways: eager, vLLM's in-tree manager, this project's,
and the floor (graphs captured for exactly the batch).

    python benchmarks/encoder_latency.py --out DIR [ARCHITECTURE[:BACKEND] ...]

An encoder is a tower of the released configuration with random weights of a real
scale; ``all`` stands for every architecture.  Inputs are random, made without an
image processor.  DIR receives tables (README.md), flat records (summary.json, as
``vllm bench sweep plot`` reads them) and figures, written anew after every encoder.
Only ratios within one encoder's table mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_encoder_cg.benchmarking.encoder import EncoderBenchmark

_VIDEOS = 1
"""Per prompt, where the model takes them: as a server has it that allows any."""


def main() -> None:
    args = _parse_arguments()
    # Nothing is fetched; a kernel of vLLM's needs the second with Triton 3.6.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")

    from vllm_encoder_cg.benchmarking.report import markdown, write_report
    from vllm_encoder_cg.samples.architectures import ARCHITECTURES

    encoders = args.encoders
    if encoders == ["all"]:
        encoders = [f"{name}:{args.backend}" for name in ARCHITECTURES]
    done: list[EncoderBenchmark] = []
    failed = []
    for encoder in encoders:
        architecture, _, backend = encoder.partition(":")
        begin = time.perf_counter()
        try:
            benchmark = run(architecture, backend or args.backend, args)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{encoder}: FAILED, {type(error).__name__}: {error}")
            print(failed[-1], flush=True)
            continue
        done.append(benchmark)
        print(markdown(benchmark), flush=True)
        print(f"{encoder}: {time.perf_counter() - begin:.0f} s\n", flush=True)
        figures = _write_plots(args.out, done)
        write_report(args.out, done, shlex.join(["python", *sys.argv]), figures)
        _give_back()
    print(_overview(done), *failed, sep="\n", flush=True)
    if failed:
        raise SystemExit(1)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "encoders", nargs="*", default=["Qwen3VLForConditionalGeneration"]
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="FLASH_ATTN", help="where none is named")
    parser.add_argument("--vision", default="released", choices=("released", "small"))
    parser.add_argument(
        "--items",
        action="append",
        metavar="640x480,336x336*4",
        help="a case instead of the default ones; may be repeated",
    )
    parser.add_argument(
        "--growth", action="store_true", help="1-64 items, 64-16384 tokens"
    )
    parser.add_argument("--no-cases", action="store_true", help="only --growth")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--limit-s", type=float, default=10.0, help="seconds per case, beyond 3 rounds"
    )
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--no-in-tree", action="store_true")
    parser.add_argument("--no-floor", action="store_true")
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="additional_config.encoder_cg"
    )
    return parser.parse_args()


def run(architecture: str, backend: str, args: argparse.Namespace) -> EncoderBenchmark:
    """Builds, captures and times one encoder."""
    from vllm_encoder_cg.benchmarking.cases import STANDARD_CASES, parse_cases
    from vllm_encoder_cg.benchmarking.encoder import BenchSettings, bench_encoder
    from vllm_encoder_cg.samples.architectures import ARCHITECTURES
    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )

    modalities = ARCHITECTURES[architecture].modalities
    limits = {"image": 64, "video": _VIDEOS}
    options = EncoderOptions(
        architecture=architecture,
        vision=args.vision,
        backend=backend,
        dtype="bfloat16",
        max_tokens=args.max_tokens,
        settings=args.settings,
        engine={"limit_mm_per_prompt": {m: limits[m] for m in modalities}},
    )
    cases: Any = parse_cases(args.items) if args.items else STANDARD_CASES
    settings = BenchSettings(
        rounds=args.rounds,
        limit_s=args.limit_s,
        in_tree=not args.no_in_tree,
        floor=not args.no_floor,
    )
    with captured_encoder(options) as manager:
        if not manager.is_captured():
            raise RuntimeError(manager.inactive_reason or "no graph was captured")
        benchmark = bench_encoder(
            manager,
            () if args.no_cases else cases,
            settings,
            growth=args.growth,
            on_progress=_progress(),
        )
        manager.clear()
    return benchmark


def _progress() -> Callable[[str], None]:
    """Names the case on a terminal, over the last one."""
    if not sys.stderr.isatty():
        return lambda name: None
    return lambda name: print(
        f"\r\033[K{name} ...", end="", file=sys.stderr, flush=True
    )


def _write_plots(folder: Path, benchmarks: list[EncoderBenchmark]) -> list[Path]:
    from vllm_encoder_cg.benchmarking.plots import write_plots

    try:
        return write_plots(folder, benchmarks)
    except ImportError as error:
        print(f"no figures: {error}; pip install 'vllm-encoder-cg[plots]'")
        return []


def _overview(benchmarks: list[EncoderBenchmark]) -> str:
    """The worst and the mean ratios of all encoders."""
    from statistics import geometric_mean

    lines = ["| encoder | worst ours / eager | ours / in-tree | ours / floor (worst) |"]
    lines.append("|---|---:|---:|---:|")
    for benchmark in benchmarks:
        cells = [benchmark.name]
        ratios = {
            way: [r.ratio("ours", way) for r in benchmark.cases if way in r.median_ms]
            for way in ("eager", "in-tree", "floor")
        }
        cells.append(f"{max(ratios['eager']):.3f}" if ratios["eager"] else "")
        for way in ("in-tree", "floor"):
            values = ratios[way]
            text = f"{geometric_mean(values):.3f} ({max(values):.3f})" if values else ""
            cells.append(text)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _give_back() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
