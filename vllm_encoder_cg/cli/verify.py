# SPDX-License-Identifier: Apache-2.0
"""``vllm-encoder-cg verify``: is the encoder by graph what it is eagerly?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

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
    percent,
    print_table,
    progress_bar,
    write_json,
    yes,
)
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.verification_cases import FULL_SIDE, Case, parse_items

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_encoder_cg.manager import EncoderCudaGraphManager
    from vllm_encoder_cg.verification import CaseResult, Verifier

_SMALL_SIDE = 512
"""Longest side of the default cases of a small sample."""
_COLUMNS = (
    "case",
    "items",
    "tokens",
    "hits",
    "eager",
    "budgets",
    "padding",
    "worst difference",
    "bitwise",
    "ok",
)
_NUMBERS = ("tokens", "hits", "eager", "padding", "worst difference")


def verify(
    model: Model = None,
    architecture: Annotated[
        str | None,
        Option(
            help="Instead of a checkpoint: a sample of this architecture, by a name "
            "that `vllm-encoder-cg models` lists."
        ),
    ] = None,
    vision: Annotated[
        Literal["small", "released"],
        Option(help="Tower of the sample: small, or of the released checkpoint."),
    ] = "small",
    backend: Backend = None,
    items: Annotated[
        str | None,
        Option(
            help="Instead of the default cases: media by size in pixels, e.g. "
            "'640x480,336x336*4,video:16x448x448'."
        ),
    ] = None,
    random_weights: RandomWeights = False,
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
    budgets: Annotated[
        str | None, Option(help="Token budgets instead of the automatic ones: 64,256.")
    ] = None,
    largest_side: Annotated[
        int | None,
        Option(
            help="Longest side, in pixels, of the default cases. Default: 2048; a "
            "small sample: 512.",
            min=1,
        ),
    ] = None,
    batches: Annotated[int, Option(help="Random batches in a row.", min=0)] = 100,
    poison: Annotated[
        bool, Option("--poison", help="Fill buffers with NaN before every call.")
    ] = False,
    tolerance: Annotated[
        float | None,
        Option(
            help="Largest relative norm of the difference, per item. Default: 1e-4 "
            "in float32, 1e-2 in float16, 2e-2 in bfloat16; twice that where linears "
            "of the encoder quantise their input.",
            min=0,
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    seed: Annotated[int, Option(help="Of inputs and random weights.")] = 0,
    json: JsonFile = None,
    verbose: Verbose = False,
) -> None:
    """Compare an encoder by graph with the same encoder run eagerly.

    Builds the model alone, without an engine, captures its encoder and runs a
    list of cases both ways.  Exit code: 0 if all are equal within the tolerance,
    1 if one is not, 2 if there was nothing to compare or an argument is wrong.
    """
    begin_output(json)
    try:
        check_encoder(model, architecture)
        if tolerance is not None and not math.isfinite(tolerance):
            raise ValueError(f"--tolerance: got {tolerance}; use a number such as 2e-2")
        given = parse_items(items) if items else None
        if given:
            check_items(architecture, given.batches)
        options = EncoderOptions(
            model=model,
            architecture=architecture,
            vision=vision,
            backend=backend,
            random_weights=random_weights,
            dtype=dtype,
            max_tokens=max_tokens,
            budgets=_parse_budgets(budgets),
            trust_remote_code=trust_remote_code,
            seed=seed,
            # What fits a graph is replayed, even where eager is faster.
            settings={"cost_model": False},
        )
    except ValueError as error:
        fail(str(error))
    prepare_vllm(offline=model is None, verbose=verbose)
    with contextlib.ExitStack() as stack:
        try:
            manager = stack.enter_context(captured_encoder(options))
        except Exception as error:  # of an option, or no such checkpoint
            fail_with(error, verbose=verbose)
        verifier = _make_verifier(manager, tolerance, seed)
        longest = largest_side or (_SMALL_SIDE if options.is_small else FULL_SIDE)
        cases = _choose_cases(manager, given, longest, batches, seed)
        if poison:
            cases = [replace(case, poison=True) for case in cases]
        try:
            results = _run(verifier, cases)
        except Exception as error:  # of vLLM's own encoder
            fail_with(error, verbose=verbose)
        print_table(_table(manager, results, verifier.tolerance))
        differences = _differences(manager, results)
        problems = differences or _nothing_compared(results)
        for problem in problems:
            console.print(problem, markup=False)
        write_json(
            json,
            _describe(manager)
            | {
                "tolerance": verifier.tolerance,
                "ok": not problems,
                "problems": problems,
                "cases": [result.as_dict() for result in results],
                "statistics": manager.get_cumulative_stats(),
            },
        )
    if problems:
        raise SystemExit(1 if differences else 2)
    console.print(f"cases that equal eager within the tolerance: all {len(results)}")


def _parse_budgets(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"budgets: got {text!r}; use integers: 64,256,1024") from None


def _make_verifier(
    manager: EncoderCudaGraphManager, tolerance: float | None, seed: int
) -> Verifier:
    from vllm_encoder_cg.verification import Verifier

    try:
        return Verifier(manager, tolerance=tolerance, seed=seed)
    except ValueError as error:
        # Every graph failed or differed, or there cannot be any.
        fail(str(error), code=1 if manager.active else 2)


def _choose_cases(
    manager: EncoderCudaGraphManager,
    given: Case | None,
    largest_side: int,
    random_batches: int,
    seed: int,
) -> list[Case]:
    """The one that was given, or the default ones."""
    from vllm_encoder_cg.verification import standard_cases

    if given is None:
        return standard_cases(
            manager,
            largest_side=largest_side,
            random_batches=random_batches,
            seed=seed,
        )
    try:
        check_items_of(manager, given.batches)
    except ValueError as error:
        fail(str(error))
    return [given]


def _run(verifier: Verifier, cases: list[Case]) -> list[CaseResult]:
    results = []
    with progress_bar(len(cases)) as begin:
        for case in cases:
            begin(case.name)
            results.append(verifier.run(case))
    return results


def _differences(
    manager: EncoderCudaGraphManager, results: list[CaseResult]
) -> list[str]:
    problems = [
        f"{result.case}: {problem}" for result in results for problem in result.problems
    ]
    problems += [
        f"graph not usable: {key} (--verbose says why)" for key in _dropped(manager)
    ]
    return problems


def _nothing_compared(results: list[CaseResult]) -> list[str]:
    if any(result.hits for result in results):
        return []
    reasons = dict.fromkeys(why for result in results for why in result.eager_reasons)
    return [f"no item went through a graph: {_in_words(reasons)}"]


def _in_words(reasons: Iterable[str]) -> str:
    return ", ".join(why.replace("_", " ") for why in reasons)


def _dropped(manager: EncoderCudaGraphManager) -> list[str]:
    return list(manager.get_cumulative_stats()["dropped_graphs"])


def _describe(manager: EncoderCudaGraphManager) -> dict[str, Any]:
    return {
        "architecture": type(manager.model).__name__,
        "device": str(manager.device),
        "dtype": str(manager.dtype).removeprefix("torch."),
        "attention_backend": manager.adapter.backend_name(),
        "max_items": manager.budgets.limits.max_items,
        "max_frames": manager.budgets.limits.max_frames,
    }


def _table(
    manager: EncoderCudaGraphManager, results: list[CaseResult], tolerance: float
) -> Table:
    about = _describe(manager)
    table = make_table(
        f"{about['architecture']} on {about['device']}, {about['dtype']}, "
        f"{about['attention_backend']}: {manager.describe_graphs()}; "
        f"tolerance {tolerance:.0e}",
        _COLUMNS,
        _NUMBERS,
    )
    for result in results:
        table.add_row(
            result.case,
            result.items,
            str(result.tokens),
            str(result.hits),
            str(result.eager),
            _budgets(result.budgets),
            percent(result.padding) if result.computed_tokens else "",
            f"{result.error:.1e}" if result.computed_tokens else "",
            yes(result.bitwise) if result.computed_tokens else "",
            _verdict(result, tolerance),
        )
    return table


def _verdict(result: CaseResult, tolerance: float) -> str:
    if not result.ok:
        return "DIFFERS"
    if not result.computed_tokens:
        return f"eager: {_in_words(result.eager_reasons)}"
    words = "ok"
    if result.allowed_error > tolerance:
        words += f": rounding explains {result.allowed_error:.1e}"
    if result.eager:
        words += f"; {result.eager} eager: {_in_words(result.eager_reasons)}"
    return words


def _budgets(budgets: list[int]) -> str:
    if len(budgets) <= 4:
        return " + ".join(map(str, budgets))
    return f"{len(budgets)} replays, {min(budgets)} to {max(budgets)}"
