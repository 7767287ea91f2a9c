# SPDX-License-Identifier: Apache-2.0
"""Figures of a benchmark.  Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_encoder_cg.benchmarking.results import EncoderBenchmark
    from vllm_encoder_cg.benchmarking.timing import CaseTimes

_COLORS = {
    "eager": "#888888",
    "in-tree": "#d9822b",
    "ours": "#2b6cb0",
    "floor": "#63a375",
}


def write_plots(
    folder: Path, benchmarks: Sequence[EncoderBenchmark], suffix: str = "png"
) -> list[Path]:
    """Latency by case, padding, memory and growth of every encoder; returns the
    paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for benchmark in benchmarks:
        figures: list[tuple[str, Any]] = []
        if benchmark.cases:
            figures.append(("latency", _latency(benchmark)))
            figures.append(("padding", _padding(benchmark)))
        if benchmark.growth:
            figures.append(("growth", _growth(benchmark)))
        for kind, figure in figures:
            written.append(_save(figure, folder / f"{benchmark.name}-{kind}.{suffix}"))
    if any(benchmark.graphs for benchmark in benchmarks):
        written.append(_save(_memory(benchmarks), folder / f"memory.{suffix}"))
    return written


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return path


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """Without pyplot: no window system is asked, and nothing is kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(1, columns, sharey=True, squeeze=False)[0]


def _title(benchmark: EncoderBenchmark) -> str:
    about = benchmark.about
    return f"{about['architecture']}, {about['backend']}, {about['device']}"


def _bars(
    axis: Any, rows: Sequence[CaseTimes], values: dict[str, list[float | None]]
) -> None:
    """Grouped horizontal bars, one group per case, the first case on top."""
    height = 0.8 / max(1, len(values))
    for i, (way, of_cases) in enumerate(values.items()):
        axis.barh(
            [k + (i - (len(values) - 1) / 2) * height for k in range(len(rows))],
            [value or 0.0 for value in of_cases],
            height,
            label=way,
            color=_COLORS.get(way),
        )
    axis.set_yticks(range(len(rows)))
    axis.set_yticklabels([f"{row.case} ({row.tokens} tokens)" for row in rows])
    axis.invert_yaxis()
    axis.legend(fontsize="small")


def _ways(rows: Sequence[CaseTimes]) -> list[str]:
    return list(dict.fromkeys(way for row in rows for way in row.median_ms))


def _latency(benchmark: EncoderBenchmark) -> Any:
    rows = benchmark.cases
    figure, (axis,) = _figure(8, 1.2 + 0.5 * len(rows))
    _bars(
        axis,
        rows,
        {way: [row.median_ms.get(way) for row in rows] for way in _ways(rows)},
    )
    axis.set_xscale("log")
    axis.set_xlabel("encoder forward, median (ms)")
    axis.set_title(_title(benchmark), fontsize="medium")
    return figure


def _padding(benchmark: EncoderBenchmark) -> Any:
    rows = benchmark.cases
    ways = dict.fromkeys(way for row in rows for way in row.padding)
    figure, (axis,) = _figure(8, 1.2 + 0.35 * len(rows))
    _bars(
        axis,
        rows,
        {way: [100 * row.padding.get(way, 0.0) for row in rows] for way in ways},
    )
    axis.set_xlabel("padding (% of replayed tokens)")
    axis.set_title(_title(benchmark), fontsize="medium")
    return figure


def _memory(benchmarks: Sequence[EncoderBenchmark]) -> Any:
    figure, (axis,) = _figure(8, 1.2 + 0.5 * len(benchmarks))
    ways = list(dict.fromkeys(way for b in benchmarks for way in b.graphs))
    height = 0.8 / max(1, len(ways))
    for i, way in enumerate(ways):
        costs = [b.graphs.get(way) for b in benchmarks]
        bars = axis.barh(
            [k + i * height for k in range(len(benchmarks))],
            [cost.memory_bytes / 2**30 if cost else 0.0 for cost in costs],
            height,
            label=way,
            color=_COLORS.get(way),
        )
        axis.bar_label(
            bars,
            [
                f"{cost.graphs} graphs, {cost.seconds:.1f} s" if cost else ""
                for cost in costs
            ],
            fontsize="x-small",
            padding=2,
        )
    axis.set_yticks([k + 0.4 - height / 2 for k in range(len(benchmarks))])
    axis.set_yticklabels([b.name for b in benchmarks], fontsize="small")
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_xlabel("memory of graphs and their buffers (GiB)")
    axis.legend(fontsize="small")
    return figure


def _growth(benchmark: EncoderBenchmark) -> Any:
    counts = sorted({row.items for row in benchmark.growth})
    figure, axes = _figure(3.2 * len(counts), 3.6, len(counts))
    for axis, count in zip(axes, counts, strict=True):
        rows = [row for row in benchmark.growth if row.items == count]
        for way in _ways(rows):
            points = [
                (row.tokens, row.median_ms[way]) for row in rows if way in row.median_ms
            ]
            axis.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=3,
                label=way,
                color=_COLORS.get(way),
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("output tokens")
        axis.set_title(f"{count} image{'s' if count > 1 else ''}", fontsize="medium")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("encoder forward, median (ms)")
    axes[0].legend(fontsize="small")
    figure.suptitle(_title(benchmark), fontsize="medium", y=1.02)
    return figure
