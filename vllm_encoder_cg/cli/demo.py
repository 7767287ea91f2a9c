# SPDX-License-Identifier: Apache-2.0
"""``vllm-encoder-cg demo``: photographs through vLLM, with and without graphs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from vllm_encoder_cg.cli.arguments import Verbose
from vllm_encoder_cg.cli.demo_engine import (
    EngineRun,
    EngineSpec,
    ItemRecord,
    redirect_output,
    run_engine,
)
from vllm_encoder_cg.cli.environment import prepare_vllm
from vllm_encoder_cg.cli.errors import fail
from vllm_encoder_cg.cli.output import (
    JsonFile,
    begin_output,
    console,
    make_table,
    print_line,
    print_table,
    write_json,
)
from vllm_encoder_cg.samples.chat_media import ChatMedia, ChatPrompt, demo_prompts

if TYPE_CHECKING:
    from PIL import Image
    from rich.table import Table

_FRAMES, _FRAME_SIZE = 8, 224

_NO_HITS = "no item went through a graph"

_COLUMNS = (
    "prompt",
    "item",
    "pixels",
    "tokens",
    "encoded",
    "budget",
    "padding",
    "difference from eager",
)
_NUMBERS = ("tokens", "budget", "padding", "difference from eager")


def demo(
    image: Annotated[
        list[Path] | None,
        Option(
            metavar="PATH",
            help="A photograph of yours; may be repeated. Default: sample ones.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            help="A checkpoint of yours, by name or folder. Default: a sample "
            "Qwen3-VL with random weights."
        ),
    ] = None,
    max_tokens: Annotated[
        int, Option(help="Tokens to generate per prompt.", min=1)
    ] = 16,
    seed: Annotated[int, Option(help="Of the engine.", min=0)] = 0,
    json: JsonFile = None,
    verbose: Verbose = False,
) -> None:
    """Encode photographs in a real vLLM engine, by graph and eagerly.

    Starts vLLM twice: with encoder CUDA graphs, where every image is also
    encoded eagerly and compared, and without, to compare the generated tokens.
    Without a GPU the graphs are replaced by running the captured forward again
    on the same buffers.  Exit code: 0 if nothing differs, 1 if something does, 2
    if there was nothing to compare or an argument is wrong.
    """
    begin_output(json)
    prompts = tuple(_prompts(image or [], seed))
    # What is logged goes to a file, which is shown if the engine fails.
    prepare_vllm(offline=model is None, verbose=verbose, quiet_level="WARNING")
    with tempfile.TemporaryDirectory(prefix="vllm-encoder-cg-") as folder:
        spec = EngineSpec(
            prompts=prompts,
            graphs=True,
            model=model,
            folder=Path(folder),
            max_tokens=max_tokens,
            seed=seed,
        )
        with_graphs = _start(spec, "with encoder graphs", verbose)
        if with_graphs.inactive_reason is not None:
            fail(f"no encoder graphs: {with_graphs.inactive_reason}")
        asked = tuple(p for p in prompts if p.name in with_graphs.token_ids)
        without = _start(
            replace(spec, prompts=asked, graphs=False),
            "without encoder graphs",
            verbose,
        )
    tolerance = _tolerance(with_graphs.dtype)
    print_table(_table(asked, with_graphs))
    problems = _problems(asked, with_graphs, without, tolerance)
    _print_summary(asked, with_graphs, problems)
    write_json(
        json,
        {
            "architecture": with_graphs.architecture,
            "device": with_graphs.device,
            "dtype": with_graphs.dtype,
            "attention_backend": with_graphs.backend,
            "tolerance": tolerance,
            "ok": not problems,
            "problems": problems,
            "prompts": [
                {
                    "prompt": prompt.name,
                    "items": [
                        {"item": media.name, "pixels": media.size}
                        | (asdict(record) if record else {})
                        for media, record in _rows(prompt, with_graphs)
                    ],
                    "token_ids": with_graphs.token_ids[prompt.name],
                    "token_ids_without_graphs": without.token_ids[prompt.name],
                }
                for prompt in asked
            ],
            "statistics": with_graphs.statistics,
        },
    )
    if problems:
        raise SystemExit(2 if problems == [_NO_HITS] else 1)


def _prompts(paths: Sequence[Path], seed: int) -> list[ChatPrompt]:
    from vllm_encoder_cg.samples.media import make_video, photographs

    try:
        images = [_open(path) for path in paths] or photographs()
    except OSError as error:
        fail(f"image: {error}; give files that are photographs")
    names: list[str] = []
    for name, _ in images:
        names.append(f"{name} ({len(names) + 1})" if name in names else name)
    images = [(name, image) for name, (_, image) in zip(names, images, strict=True)]
    frames, _ = make_video(_FRAMES, _FRAME_SIZE, _FRAME_SIZE, seed, images[0][1])
    return demo_prompts(images, frames)


def _open(path: Path) -> tuple[str, Image.Image]:
    from PIL import Image

    with Image.open(path) as image:
        return path.stem, image.convert("RGB")


def _start(spec: EngineSpec, how: str, verbose: bool) -> EngineRun:
    """Runs an engine in a fresh process, which gives all GPU memory back."""
    log = None if verbose else spec.folder / "log.txt"
    if not console.is_terminal:
        print_line(f"vLLM {how} ...")
    with (
        console.status(f"vLLM {how} ..."),
        ProcessPoolExecutor(
            1,
            mp_context=get_context("spawn"),
            initializer=redirect_output,
            initargs=(log,),
        ) as pool,
    ):
        try:
            return pool.submit(run_engine, spec).result()
        except Exception as error:
            if log is not None and log.exists():
                print_line(log.read_text(errors="replace")[-8000:])
            fail(f"vLLM {how} failed: {type(error).__name__}: {error}")


def _tolerance(dtype: str) -> float:
    import torch

    from vllm_encoder_cg.startup.self_check import SELF_CHECK_TOLERANCE

    return 1e-4 if dtype == "float32" else SELF_CHECK_TOLERANCE[getattr(torch, dtype)]


def _rows(
    prompt: ChatPrompt, run: EngineRun
) -> list[tuple[ChatMedia, ItemRecord | None]]:
    """Each item with its record; None: vLLM encoded it without asking for graphs.

    vLLM encodes a prompt modality by modality, in the order of the prompt, and a
    repeated item once.
    """
    records: dict[str, list[ItemRecord]] = {}
    for record in run.items[prompt.name]:
        records.setdefault(record.modality, []).append(record)
    first: dict[str, ItemRecord | None] = {}
    for media in prompt.media:
        if str(media.part) not in first:
            waiting = records.get(media.modality)
            first[str(media.part)] = waiting.pop(0) if waiting else None
    return [(media, first[str(media.part)]) for media in prompt.media]


def _table(prompts: Sequence[ChatPrompt], run: EngineRun) -> Table:
    table = make_table(
        f"{run.architecture} on {run.device}, {run.dtype}, {run.backend}",
        _COLUMNS,
        _NUMBERS,
    )
    for prompt in prompts:
        for media, record in _rows(prompt, run):
            table.add_row(prompt.name, media.name, media.size, *_cells(record))
        table.add_section()
    return table


def _cells(record: ItemRecord | None) -> tuple[str, ...]:
    if record is None:
        return ("", "by vLLM itself", "", "", "")
    if record.replay is None:
        how = f"eagerly: {record.reason}"
        return (str(record.tokens), how, "", "", _error(record))
    return (
        str(record.tokens),
        f"hit, replay {record.replay}",
        str(record.budget),
        str(record.padding),
        _error(record),
    )


def _error(record: ItemRecord) -> str:
    return "" if record.error is None else f"{record.error:.1e}"


def _problems(
    prompts: Sequence[ChatPrompt],
    with_graphs: EngineRun,
    without: EngineRun,
    tolerance: float,
) -> list[str]:
    problems = []
    for prompt in prompts:
        for media, record in _rows(prompt, with_graphs):
            if record and record.error is not None and record.error > tolerance:
                problems.append(
                    f"{prompt.name}: {media.name} differs from eager by "
                    f"{record.error:.1e}, more than {tolerance:.0e}"
                )
        if with_graphs.token_ids[prompt.name] != without.token_ids[prompt.name]:
            problems.append(f"{prompt.name}: other tokens than without graphs")
    if not with_graphs.statistics["graph_hits"]:
        problems.append(_NO_HITS)
    return problems


def _print_summary(
    prompts: Sequence[ChatPrompt], run: EngineRun, problems: list[str]
) -> None:
    counts: dict[str, Any] = run.statistics
    console.print(
        f"graph hits: {counts['graph_hits']}, misses: {counts['graph_misses']}, "
        f"padding: {counts['padding_rate']:.1%} of replayed tokens, graphs: "
        f"{counts['num_budgets']}"
    )
    if run.device == "cpu":
        console.print("no GPU: captured forwards were run again in place of graphs")
    for problem in problems:
        console.print(problem, markup=False)
    if not problems:
        console.print(
            f"the tokens generated for {len(prompts)} prompts equal those without "
            "encoder graphs"
        )
