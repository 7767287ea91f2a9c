# SPDX-License-Identifier: Apache-2.0
"""Times encoders on a GPU four ways: eager, vLLM's in-tree manager, this project's,
and the floor (graphs captured for exactly the batch).

    python benchmarks/encoder_latency.py --out DIR [ARCHITECTURE[:BACKEND] ...]

An encoder is a tower of the released configuration with random weights of a real
scale; ``all`` stands for every architecture.  Inputs are random, made without an
image processor.  DIR receives tables (README.md) and flat records (summary.json, as
``vllm bench sweep plot`` reads them), written anew after every case, and figures.
Only ratios within one encoder's table mean anything.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
)

if TYPE_CHECKING:
    from vllm_encoder_cg.benchmarking.results import EncoderBenchmark

_VIDEOS = 1
"""Per prompt, where the model takes them: as a server has it that allows any."""


def main() -> int:
    args = _parse_arguments()
    prepare_environment()
    from vllm_encoder_cg.samples.architectures import ARCHITECTURES

    encoders = args.encoders
    if encoders == ["all"]:
        encoders = [f"{name}:{args.backend}" for name in ARCHITECTURES]
    attempts = Attempts(args.stop_after)
    report = Report(args.out)
    for encoder in encoders:
        attempts.run(encoder, lambda e=encoder: run(e, args, report, attempts))  # type: ignore[misc]
        report.write(figures=True)
    attempts.problems += [
        problem for b in report.benchmarks for problem in memory_problems(b)
    ]
    print(_overview(report.benchmarks), flush=True)
    return attempts.finish(_verdict(report.benchmarks))


class Report:
    """The benchmarks so far, in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.benchmarks: list[EncoderBenchmark] = []
        self._figures: list[Path] = []

    def update(self, benchmark: EncoderBenchmark) -> None:
        """With an encoder that is new, or has another case."""
        if not any(b is benchmark for b in self.benchmarks):
            self.benchmarks.append(benchmark)
        self.write()

    def write(self, *, figures: bool = False) -> None:
        from vllm_encoder_cg.benchmarking.report import write_report

        if figures:
            self._figures = _write_plots(self.folder, self.benchmarks)
        command = shlex.join(["python", *sys.argv])
        write_report(self.folder, self.benchmarks, command, self._figures)


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
    add_time_limit(parser)
    return parser.parse_args()


def run(
    encoder: str, args: argparse.Namespace, report: Report, attempts: Attempts
) -> None:
    """Builds, captures and times one encoder; what is measured is written as it
    comes."""
    import torch

    from vllm_encoder_cg.benchmarking.cases import STANDARD_CASES, parse_cases
    from vllm_encoder_cg.benchmarking.encoder import BenchSettings, bench_encoder
    from vllm_encoder_cg.benchmarking.report import markdown
    from vllm_encoder_cg.samples.architectures import ARCHITECTURES
    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )

    architecture, _, backend = encoder.partition(":")
    on_gpu = torch.cuda.is_available()
    modalities = ARCHITECTURES[architecture].modalities
    limits = {"image": 64, "video": _VIDEOS}
    options = EncoderOptions(
        architecture=architecture,
        vision=args.vision,
        backend=(backend or args.backend) if on_gpu else None,
        dtype="bfloat16" if on_gpu else None,
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
    in_time = True

    def go_on(benchmark: EncoderBenchmark) -> bool:
        nonlocal in_time
        report.update(benchmark)
        in_time = attempts.in_time()
        return in_time

    with captured_encoder(options) as manager:
        if not manager.is_captured():
            raise RuntimeError(manager.inactive_reason or "no graph was captured")
        benchmark = bench_encoder(
            manager,
            () if args.no_cases else cases,
            settings,
            growth=args.growth,
            on_progress=_progress(),
            go_on=go_on,
        )
        report.update(benchmark)
        manager.clear()
    print(markdown(benchmark), flush=True)
    if not in_time:
        raise TimeoutError("no time left for all cases")


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


def _ratios(benchmark: EncoderBenchmark, way: str) -> list[float]:
    """Of ours to a way, over the cases, or over the growth where there are none."""
    rows = benchmark.cases or benchmark.growth
    return [row.ratio("ours", way) for row in rows if way in row.median_ms]


def _overview(benchmarks: list[EncoderBenchmark]) -> str:
    """The worst and the mean ratios of all encoders, and what their graphs took."""
    from statistics import geometric_mean

    from vllm_encoder_cg.benchmarking.report import graph_cost

    ratios = "worst ours / eager | ours / in-tree (worst) | ours / floor (worst)"
    lines = [f"| encoder | {ratios} | our graphs |", "|---|---:|---:|---:|---|"]
    for benchmark in benchmarks:
        cells = [benchmark.name]
        eager = _ratios(benchmark, "eager")
        cells.append(f"{max(eager):.3f}" if eager else "")
        for way in ("in-tree", "floor"):
            values = _ratios(benchmark, way)
            text = f"{geometric_mean(values):.3f} ({max(values):.3f})" if values else ""
            cells.append(text)
        cost = benchmark.graphs.get("ours")
        cells.append("" if cost is None else graph_cost(cost))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_problems(benchmark: EncoderBenchmark) -> list[str]:
    """Graphs that take more memory than they may."""
    cost = benchmark.graphs.get("ours")
    if cost is None or cost.memory_bytes <= (cost.memory_limit_bytes or math.inf):
        return []
    from vllm_encoder_cg.benchmarking.report import graph_cost

    return [f"{benchmark.name}: more memory than the limit: {graph_cost(cost)}"]


def _verdict(benchmarks: list[EncoderBenchmark]) -> str:
    """The worst ratios of all, and the longest start-up."""
    parts = [f"{len(benchmarks)} encoders"]
    for way in ("eager", "in-tree", "floor"):
        values = [value for b in benchmarks for value in _ratios(b, way)]
        if values:
            parts.append(f"ours / {way} {max(values):.3f} at most")
    costs = [b.graphs["ours"] for b in benchmarks if "ours" in b.graphs]
    if costs:
        parts.append(f"start-up {max(cost.seconds for cost in costs):.1f} s at most")
        gib = max(cost.memory_bytes for cost in costs) / 2**30
        parts.append(f"graphs {gib:.2f} GiB at most")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
