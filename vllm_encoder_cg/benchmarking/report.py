# SPDX-License-Identifier: Apache-2.0
"""Tables and files of a benchmark.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

from vllm_encoder_cg.benchmarking.results import OURS, EncoderBenchmark, GraphCost
from vllm_encoder_cg.benchmarking.scripts import write_json

if TYPE_CHECKING:
    from vllm_encoder_cg.benchmarking.timing import CaseTimes

CPU_NOTE = (
    "No GPU: the captured forward is run again in place of a graph, so these times say "
    "nothing of graphs."
)


def title(benchmark: EncoderBenchmark) -> str:
    """The encoder, the machine and what its graphs took, in one line."""
    about = benchmark.about
    line = (
        f"{about['architecture']}, {about['backend']}, {about['dtype']}, "
        f"{about['device']}, vLLM {about['vllm']}, PyTorch {about['torch']}, "
        f"{about['captured']} captured"
    )
    for way, cost in benchmark.graphs.items():
        line += f"; {way}: {graph_cost(cost)}"
    return line


def graph_cost(cost: GraphCost) -> str:
    """Count, memory and start-up of graphs, the start-up by its parts."""
    memory = f"{cost.memory_bytes / 2**30:.2f} GiB"
    if cost.memory_limit_bytes is not None:
        memory += f" (limit {cost.memory_limit_bytes / 2**30:.2f})"
    phases = " + ".join(f"{name} {s:.1f}" for name, s in cost.phases.items())
    return (
        f"{cost.graphs} graphs, {memory}, {cost.seconds:.1f} s"
        f"{f' ({phases})' if phases else ''}"
    )


def table_rows(rows: Sequence[CaseTimes]) -> tuple[list[str], list[list[str]]]:
    """Columns, and cells of the cases followed by the worst and the mean ratios."""
    ways = _ways(rows)
    others = [way for way in ways if way != OURS]
    columns = [
        "case",
        "tokens",
        *(f"{way} (ms)" for way in ways),
        *(f"{OURS} / {way}" for way in others),
        "padding",
    ]
    cells = [
        [
            row.case,
            str(row.tokens),
            *(_cell(row.median_ms.get(way), ".2f") for way in ways),
            *(_ratio(row, way) for way in others),
            _cell(row.padding.get(OURS), ".1%"),
        ]
        for row in rows
    ]
    # A row of one case says the same thrice.
    if len(rows) > 1:
        summaries: list[tuple[str, Callable[[list[float]], float]]] = [
            ("worst", max),
            ("geometric mean", geometric_mean),
        ]
        for label, pick in summaries:
            ratios = [
                [row.ratio(OURS, way) for row in rows if way in row.median_ms]
                for way in others
            ]
            cells.append(
                [label, "", *("" for _ in ways)]
                + [_cell(pick(values), ".3f") for values in ratios]
                + [""]
            )
    return columns, cells


def _ways(rows: Sequence[CaseTimes]) -> list[str]:
    return list(dict.fromkeys(way for row in rows for way in row.median_ms))


def _ratio(row: CaseTimes, way: str) -> str:
    return _cell(row.ratio(OURS, way) if way in row.median_ms else None, ".3f")


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def markdown(benchmark: EncoderBenchmark) -> str:
    """Title and tables of one encoder."""
    parts = [f"**{title(benchmark)}**"]
    if benchmark.about["device"] == "cpu":
        parts.append(CPU_NOTE)
    if benchmark.cases:
        parts.append(_markdown_table(*table_rows(benchmark.cases)))
        parts += _floor_note(benchmark.cases)
    if benchmark.growth:
        parts.append("Growth with the number of images and their tokens:")
        parts.append(_markdown_table(*table_rows(benchmark.growth)))
    return "\n\n".join(parts) + "\n"


def _floor_note(rows: Sequence[CaseTimes]) -> list[str]:
    """Of which cases the floor is not a graph of vLLM's own forward."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        if row.floor_kind is not None:
            kinds.setdefault(row.floor_kind, []).append(row.case)
    if not kinds:
        return []
    if len(kinds) == 1:
        return [f"The floor is a graph of {next(iter(kinds))}, of each exact shape."]
    named = "; ".join(f"{kind}: {', '.join(cases)}" for kind, cases in kinds.items())
    return [f"The floor is a graph of each exact shape ({named})."]


def _markdown_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(
    folder: Path,
    benchmarks: Sequence[EncoderBenchmark],
    command: str = "",
    figures: Sequence[Path] = (),
) -> list[Path]:
    """Writes ``summary.json`` (flat records) and ``README.md`` (tables, with
    `figures`, which lie in the same folder) into a folder, which it makes; returns
    the paths."""
    records = [record for benchmark in benchmarks for record in benchmark.records()]
    summary = folder / "summary.json"
    write_json(summary, records)
    tables = folder / "README.md"
    head = "# Time of one encoder call\n\n"
    if command:
        head += f"```\n{command}\n```\n\n"
    shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in figures)
    tables.write_text(head + "\n".join(map(markdown, benchmarks)) + shown)
    return [summary, tables]
