# SPDX-License-Identifier: Apache-2.0
"""``vllm-encoder-cg plan``: token budgets for the traffic that was recorded."""

from __future__ import annotations

import json as json_format
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from vllm_encoder_cg.cli.errors import fail
from vllm_encoder_cg.cli.output import (
    JsonFile,
    begin_output,
    check_writable,
    console,
    make_table,
    percent,
    print_line,
    print_table,
    write_json,
)
from vllm_encoder_cg.observability.trace import TraceError, read_trace
from vllm_encoder_cg.planning.budget_search import GraphMemory
from vllm_encoder_cg.planning.cost_file import CostFile, CostFileError, read_costs
from vllm_encoder_cg.planning.proposal import (
    UNMEASURED,
    Ladder,
    Outcome,
    ProposalLimits,
    estimate_memory,
    known_ladders,
    memory_of,
    propose,
    simulate,
)
from vllm_encoder_cg.planning.traffic import (
    Traffic,
    parse_mix,
    traffic_of_mix,
    traffic_of_trace,
)
from vllm_encoder_cg.settings import EncoderCgSettings

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_encoder_cg.planning.costs import CostModel

_MIN_TOKENS, _MAX_TOKENS = 64, 16384
_MEMORY_GIB = EncoderCgSettings().memory_limit_gib or math.inf
_MOST_ITEMS = 1000
"""Of a made-up batch: vLLM encodes fewer at once, and beyond a plan takes minutes."""
_MOST_BATCHES = 20000
"""Distinct batches that are simulated; of more, an even choice."""

_FEW_BATCHES = 300
"""Below, chance decides which sizes a trace has."""

_COLUMNS = ("budgets", "graphs", "from", "to", "items per replay", "hit rate")
_MEASURES = ("padding", "replays per batch", "memory (GiB)")


@dataclass(frozen=True)
class Row:
    """One ladder and what became of the traffic."""

    name: str
    ladder: Ladder
    outcome: Outcome


def plan(
    trace: Annotated[
        list[str] | None,
        Argument(
            metavar="[TRACE]...",
            help="Files that additional_config.encoder_cg.trace_file wrote, a folder "
            "of them, or a pattern.",
        ),
    ] = None,
    items: Annotated[
        str | None,
        Option(
            help="Instead of a trace: sizes in pixels, or numbers of tokens, with "
            "their shares: '640x480*0.5,video:16x448x448*0.1,300*0.4'."
        ),
    ] = None,
    items_per_batch: Annotated[
        int,
        Option(
            help="With --items: batches have 1 to this many items, equally often.",
            min=1,
            max=_MOST_ITEMS,
        ),
    ] = 1,
    token_side: Annotated[
        int,
        Option(
            help="With --items: pixels per side of one output token (Qwen3-VL 32, "
            "Qwen2-VL and Qwen2.5-VL 28).",
            min=1,
        ),
    ] = 32,
    min_tokens: Annotated[
        int | None,
        Option(help="Smallest automatic budget. Default: of the trace; 64.", min=1),
    ] = None,
    max_tokens: Annotated[
        int | None,
        Option(
            help="Largest automatic budget: the lesser of --max-model-len and "
            "--max-num-batched-tokens. Default: of the trace; 16384.",
            min=1,
        ),
    ] = None,
    max_graphs: Annotated[int, Option(help="Most budgets.", min=1)] = 64,
    memory_gib: Annotated[
        float,
        Option(
            help="Most memory for graphs and their buffers, as "
            "additional_config.encoder_cg.memory_limit_gib has it."
        ),
    ] = _MEMORY_GIB,
    max_items: Annotated[
        int | None,
        Option(
            help="Items per replay. Default: the largest batch, between 8 and 64.",
            min=1,
        ),
    ] = None,
    ranks: Annotated[
        int,
        Option(
            help="Tensor-parallel ranks that share the items of a batch "
            "(--mm-encoder-tp-mode data). Counts are of all ranks; a batch takes as "
            "long as on its slowest.",
            min=1,
        ),
    ] = 1,
    largest: Annotated[
        int | None,
        Option(help="Also a budget of this size, for what was not recorded.", min=1),
    ] = None,
    cost_file: Annotated[
        Path | None,
        Option(
            help="Times that additional_config.encoder_cg.cost_file wrote: budgets "
            "then save time, not padding."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        Option(help="Draw the distribution with the budgets: a .png or .svg file."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Propose token budgets for recorded traffic.

    Prints what the planner would do with the proposed budgets and with those that
    are captured without any, and the --compilation-config to paste.  Nothing is
    loaded and no GPU is used.  Exit code 2: an argument or a file is wrong.
    """
    begin_output(json)
    if bool(trace) == (items is not None):
        fail("give either TRACE files, or --items with sizes and shares")
    if not 0 < memory_gib < math.inf:
        fail(f"memory-gib: got {memory_gib}; use a number above 0")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        fail(f"plot: got {plot}; use a name that ends in .png or .svg")
    check_writable("plot", plot)
    try:
        if trace:
            traffic = traffic_of_trace(read_trace(trace))
            _report_size(sum(traffic.batches.values()))
        else:
            mix = parse_mix(items or "", token_side)
            numbers = range(1, items_per_batch + 1)
            traffic = traffic_of_mix(mix, _MIN_TOKENS, _MAX_TOKENS, numbers)
        traffic = _changed(traffic, min_tokens, max_tokens, ranks)
        costs, memory = _read_costs(cost_file, traffic)
        shown = traffic.thinned(_MOST_BATCHES)
        if shown is not traffic:
            console.print(
                f"{len(shown.batches)} of {len(traffic.batches)} distinct batches are "
                "simulated"
            )
        limits = ProposalLimits(max_graphs, memory_gib, max_items, largest)
        with console.status("searching budgets ..."):
            ladder, outcome = propose(shown, limits, costs, memory)
            rows = [Row("proposed", ladder, outcome), *_other_rows(shown, costs)]
    except (TraceError, CostFileError, FileNotFoundError, ValueError) as error:
        fail(str(error))
    measured = cost_file is not None
    print_table(_table(rows, shown, memory, measured))
    compilation_config = {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": list(_list_of(ladder)),
        "encoder_cudagraph_max_vision_items_per_batch": ladder.max_items,
    }
    print_line(f"--compilation-config '{json_format.dumps(compilation_config)}'")
    if memory_gib > _MEMORY_GIB:
        options = {"encoder_cg": {"memory_limit_gib": memory_gib}}
        print_line(f"--additional-config '{json_format.dumps(options)}'")
    if plot is not None:
        _draw(plot, rows)
    write_json(
        json,
        {
            "architecture": traffic.architecture,
            "ranks": ranks,
            "compilation_config": compilation_config,
            "ladders": [_describe(row, memory, measured) for row in rows],
        },
    )


def _report_size(batches: float) -> None:
    """How far the proposal is to be believed."""
    text = f"{batches:.0f} batches were recorded"
    if batches < _FEW_BATCHES:
        text += (
            f": too few to stand for traffic to come; record at least {_FEW_BATCHES}"
        )
    console.print(text)


def _changed(
    traffic: Traffic, min_tokens: int | None, max_tokens: int | None, ranks: int
) -> Traffic:
    """With other bounds than it has, where given, on so many ranks."""
    traffic = replace(
        traffic,
        min_tokens=min_tokens or traffic.min_tokens,
        max_tokens=max_tokens or traffic.max_tokens,
        ranks=ranks,
    )
    if traffic.min_tokens > traffic.max_tokens:
        raise ValueError(
            f"min-tokens: {traffic.min_tokens} is above max-tokens, "
            f"{traffic.max_tokens}"
        )
    return traffic


def _read_costs(path: Path | None, traffic: Traffic) -> tuple[CostModel, GraphMemory]:
    """What plans are priced by, and what graphs of one path take."""
    if path is None:
        return UNMEASURED, estimate_memory(
            traffic.recorded_budgets, traffic.recorded_memory_bytes
        )
    try:
        content: CostFile = read_costs(path)
    except FileNotFoundError:
        raise CostFileError(f"cost-file: there is no file {path}") from None
    architecture = content.measured.architecture
    if traffic.architecture not in (None, architecture):
        raise CostFileError(
            f"{path}: measured with {architecture}, and the trace is of "
            f"{traffic.architecture}"
        )
    paths = len(traffic.paths)
    per_path = max(1, content.graphs // paths)
    taken = dict.fromkeys(traffic.paths, (content.largest_budget,) * per_path)
    return content.costs(), estimate_memory(taken, content.memory_bytes)


def _other_rows(traffic: Traffic, costs: CostModel) -> list[Row]:
    names = {"fine": "fine (the default)", "power_of_two": "power of two"}
    ladders = {names[name]: ladder for name, ladder in known_ladders(traffic).items()}
    if any(traffic.recorded_budgets.values()) and traffic.recorded_items:
        recorded = Ladder(traffic.recorded_budgets, traffic.recorded_items)
        ladders = {"as recorded": recorded} | ladders
    return [
        Row(name, ladder, simulate(traffic, ladder, costs))
        for name, ladder in ladders.items()
    ]


def _list_of(ladder: Ladder) -> tuple[int, ...]:
    """The one list of a proposal."""
    return next(iter(ladder.budgets.values()))


def _table(
    rows: list[Row], traffic: Traffic, memory: GraphMemory, measured: bool
) -> Table:
    what = traffic.architecture or "the stated mix"
    most = max(map(len, traffic.batches))
    ranks = f" on {traffic.ranks} ranks" if traffic.ranks > 1 else ""
    table = make_table(
        f"{what}: {len(traffic.batches)} distinct batches of up to {most} items{ranks}",
        (*_COLUMNS, *_MEASURES, *(("ms per batch",) if measured else ())),
        (*_COLUMNS[1:], *_MEASURES, "ms per batch"),
    )
    for row in rows:
        values = _describe(row, memory, measured)
        table.add_row(
            row.name,
            str(values["graphs"]),
            str(values["smallest"]),
            str(values["largest"]),
            str(values["max_items"]),
            percent(values["hit_rate"]),
            percent(values["padding"]),
            f"{values['replays_per_batch']:.2f}",
            f"{values['memory_gib']:.2f}",
            *((f"{values['ms_per_batch']:.3f}",) if measured else ()),
        )
    return table


def _describe(row: Row, memory: GraphMemory, measured: bool) -> dict[str, Any]:
    budgets = sorted({b for of_path in row.ladder.budgets.values() for b in of_path})
    outcome = row.outcome
    return {
        "name": row.name,
        "budgets": {path: list(b) for path, b in row.ladder.budgets.items()},
        "graphs": row.ladder.graphs,
        "smallest": budgets[0] if budgets else 0,
        "largest": budgets[-1] if budgets else 0,
        "max_items": row.ladder.max_items,
        "hit_rate": outcome.hit_rate,
        "padding": outcome.padding,
        "replays_per_batch": outcome.replays / outcome.batches,
        "eager_calls_per_batch": outcome.eager_calls / outcome.batches,
        "memory_gib": memory_of(row.ladder, memory) / 2**30,
        "ms_per_batch": outcome.cost / outcome.batches if measured else None,
    }


def _draw(path: Path, rows: list[Row]) -> None:
    try:
        from vllm_encoder_cg.cli.plan_figure import draw
    except ImportError as error:
        fail(f"plot: {error}; install it with: pip install 'vllm-encoder-cg[plots]'")
    try:
        draw(
            path,
            rows[0].outcome.demands,
            {row.name: row.ladder.budgets for row in rows},
        )
    except OSError as error:
        fail(f"plot: {path} cannot be written: {error.strerror}")
    console.print(f"written to {path}")
