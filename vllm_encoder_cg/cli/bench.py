# SPDX-License-Identifier: Apache-2.0
"""``vllm-encoder-cg bench``: how long an encoder takes, with and without graphs."""

from __future__ import annotations

import json as json_format
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from vllm_encoder_cg.benchmarking.cases import (
    SMALL_CASES,
    STANDARD_CASES,
    BenchCase,
    parse_cases,
)
from vllm_encoder_cg.benchmarking.report import (
    CPU_NOTE,
    table_rows,
    title,
    write_report,
)
from vllm_encoder_cg.cli.arguments import (
    Backend,
    Dtype,
    MaxTokens,
    Model,
    RandomWeights,
    TrustRemoteCode,
    Verbose,
    check_encoder,
    check_items,
    check_items_of,
)
from vllm_encoder_cg.cli.environment import prepare_vllm
from vllm_encoder_cg.cli.errors import fail, fail_with
from vllm_encoder_cg.cli.output import (
    JsonFile,
    begin_output,
    console,
    make_table,
    print_table,
    progress_bar,
    write_json,
)
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.settings import EncoderCgSettings

if TYPE_CHECKING:
    from vllm_encoder_cg.benchmarking.encoder import EncoderBenchmark
    from vllm_encoder_cg.benchmarking.timing import CaseTimes


def bench(
    model: Model = None,
    architecture: Annotated[
        str | None,
        Option(
            help="Instead of a checkpoint: a sample of this architecture with random "
            "weights, by a name that `vllm-encoder-cg models` lists."
        ),
    ] = None,
    vision: Annotated[
        Literal["small", "released"] | None,
        Option(
            help="Tower of the sample: small, or of the released checkpoint. Default: "
            "released; on a CPU small."
        ),
    ] = None,
    backend: Backend = None,
    items: Annotated[
        list[str] | None,
        Option(
            help="A batch to time instead of the default ones, by size in pixels: "
            "'640x480,336x336*4' or 'video:16x448x448'. May be repeated."
        ),
    ] = None,
    growth: Annotated[
        bool,
        Option("--growth", help="Also over 1 to 64 images and 64 to 16384 tokens."),
    ] = False,
    rounds: Annotated[int, Option(help="Calls per batch and way.", min=3)] = 30,
    limit_s: Annotated[
        float, Option(help="Most seconds per batch, beyond three rounds.", min=0)
    ] = 10.0,
    in_tree: Annotated[
        bool, Option(help="Time vLLM's own encoder graphs, too, where it has any.")
    ] = True,
    floor: Annotated[
        bool, Option(help="Time a graph captured for exactly each batch, too.")
    ] = True,
    random_weights: RandomWeights = False,
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
    settings: Annotated[
        str,
        Option(help="additional_config.encoder_cg as JSON: '{\"max_graphs\": 16}'."),
    ] = "{}",
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None,
        Option(
            help="Folder for summary.json (as `vllm bench sweep plot` reads it), "
            "README.md with the tables, and figures where matplotlib is installed."
        ),
    ] = None,
    seed: Annotated[int, Option(help="Of random weights.")] = 0,
    json: JsonFile = None,
    verbose: Verbose = False,
) -> None:
    """Time an encoder eagerly, by vLLM's own graphs and by this package's.

    Builds the model alone, without an engine, and calls its encoder on random
    batches, all ways in turn.  "floor" is a graph captured for exactly the batch: no
    graph of the same forward that serves other batches can undercut it.  Only ratios
    within one table mean anything.  --json has the flat records of summary.json.
    Exit code 2: nothing could be timed by graph, or an argument is wrong.
    """
    begin_output(json)
    try:
        check_encoder(model, architecture)
        given = parse_cases(items or [])
        check_items(architecture, (case.batch for case in given))
        extra = _parse_settings(settings)
    except ValueError as error:
        fail(str(error))
    prepare_vllm(offline=model is None, verbose=verbose)

    from vllm.platforms import current_platform

    on_cpu = bool(current_platform.is_cpu())
    options = EncoderOptions(
        model=model,
        architecture=architecture,
        vision=vision or ("small" if on_cpu else "released"),
        backend=backend,
        random_weights=random_weights,
        dtype=dtype,
        max_tokens=max_tokens,
        trust_remote_code=trust_remote_code,
        seed=seed,
        settings=extra,
    )
    if out is not None:
        _make_folder(out)
    cases = given or (SMALL_CASES if options.is_small else STANDARD_CASES)
    try:
        benchmark, hits = _run(options, cases, rounds, limit_s, in_tree, floor, growth)
    except Exception as error:  # of an option, or of vLLM's own encoder
        fail_with(error, verbose=verbose)
    _print(benchmark, on_cpu)
    write_json(json, benchmark.records())
    if out is not None:
        _write(out, benchmark)
    if not hits:
        fail("no item went through a graph: all are above every budget, or faster so")


def _parse_settings(text: str) -> dict[str, Any]:
    try:
        options = json_format.loads(text)
    except json_format.JSONDecodeError as error:
        raise ValueError(f"settings: got {text!r}; use JSON: {error}") from None
    EncoderCgSettings.from_additional_config({"encoder_cg": options})
    return options


def _run(
    options: EncoderOptions,
    cases: tuple[BenchCase, ...],
    rounds: int,
    limit_s: float,
    in_tree: bool,
    floor: bool,
    growth: bool,
) -> tuple[EncoderBenchmark, int]:
    """What was measured, and how many items went through graphs meanwhile."""
    from vllm_encoder_cg.benchmarking.encoder import (
        BenchSettings,
        bench_encoder,
        growth_points,
    )

    with captured_encoder(options) as manager:
        if not manager.is_captured():
            fail(f"no encoder graphs: {manager.inactive_reason or 'none was captured'}")
        check_items_of(manager, (case.batch for case in cases))
        steps = len(cases)
        if growth:
            steps += len(growth_points(manager.largest_budget()))
        with progress_bar(steps) as begin:
            benchmark = bench_encoder(
                manager,
                cases,
                BenchSettings(rounds, limit_s, in_tree, floor),
                growth=growth,
                on_progress=begin,
            )
        return benchmark, manager.get_cumulative_stats()["graph_hits"]


def _print(benchmark: EncoderBenchmark, on_cpu: bool) -> None:
    console.print(title(benchmark), markup=False)
    if on_cpu:
        console.print(CPU_NOTE)
    for rows in (benchmark.cases, benchmark.growth):
        if rows:
            _print_table(rows)


def _print_table(rows: list[CaseTimes]) -> None:
    columns, cells = table_rows(rows)
    table = make_table("", columns, columns[1:])
    for line in cells:
        table.add_row(*line)
    print_table(table)


def _make_folder(folder: Path) -> None:
    """Early: what cannot be written need not be measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"out: {folder} cannot be made: {error.strerror}")


def _write(folder: Path, benchmark: EncoderBenchmark) -> None:
    command = shlex.join(["vllm-encoder-cg", *sys.argv[1:]])
    figures: list[Path] = []
    try:
        try:
            from vllm_encoder_cg.benchmarking.plots import write_plots

            figures = write_plots(folder, [benchmark])
        except ImportError as error:
            console.print(f"no figures: {error}; pip install 'vllm-encoder-cg[plots]'")
        written = write_report(folder, [benchmark], command, figures)
    except OSError as error:
        fail(f"out: {folder} cannot be written: {error.strerror}")
    for path in (*written, *figures):
        console.print(f"written to {path}")
