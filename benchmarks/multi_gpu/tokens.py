# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of engines on several ranks, with encoder graphs and without."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.multi_gpu.engines import engine_args, make_checkpoint, make_job
from benchmarks.multi_gpu.processes import run_jobs
from benchmarks.multi_gpu.results import Results, Row, TimeLimit

LAYOUTS = ("data", "ray", "stages", "weights")
"""Tensor parallel with either mode of the encoder, the first also with vLLM's Ray
executor, and a pipeline of two stages."""

Found = dict[str, Any]
"""What ``engines.generate`` returns."""


@dataclass(frozen=True)
class Engine:
    """One that is started."""

    runner: str
    layout: str
    arguments: dict[str, Any]
    environment: dict[str, str]
    graphs: bool
    encoding_ranks: int
    """The first ones, which have graphs."""

    @property
    def name(self) -> str:
        flag = "" if self.graphs else ", without the flag"
        return f"{self.runner}, {self.layout}{flag}"


def compare_tokens(
    ranks: int,
    vision: str,
    folder: Path,
    results: Results,
    limit: TimeLimit,
    at_once: int,
    layouts: Sequence[str] = (),
) -> None:
    """A row per engine with graphs, whose tokens are compared with its own after the
    graphs are set aside; and one per runner of vLLM against an engine without the flag.

    Args:
        at_once: engines that run beside each other.
        layouts: of ``LAYOUTS``; none: all.
    """
    no_ray = why_no_ray()
    if no_ray is not None and "ray" in layouts:
        results.add_problem("tokens", "ray", no_ray)
    elif no_ray is not None and not layouts:
        print(f"tokens, ray: not run: {no_ray}", flush=True)
    checkpoint = make_checkpoint(ranks, vision, folder)
    engines = {
        each.name: each
        for each in list_engines(ranks, vision)
        if not layouts or each.layout in layouts
    }
    jobs = [
        make_job(
            name,
            {**each.arguments, "model": str(checkpoint)},
            each.environment,
            folder / f"{name}.json",
        )
        for name, each in engines.items()
    ]
    found: dict[str, Found] = {}
    for job, outcome in run_jobs(jobs, folder, limit, at_once):
        if outcome.error is not None:
            results.add_problem("tokens", job.name, outcome.error)
            continue
        found[job.name] = json.loads((folder / f"{job.name}.json").read_text())
        for row in rows_of(engines[job.name], found):
            results.add({"part": "tokens", "ranks": ranks} | row)


def list_engines(ranks: int, vision: str) -> list[Engine]:
    """Those that show most come first."""
    engines = []
    for layout, (parallel, encoding_ranks) in _layouts(ranks).items():
        for runner, environment in _runners().items():
            for graphs in (True, False) if layout == "data" else (True,):
                flag = {"cudagraph_mm_encoder": True} if graphs else {}
                arguments = engine_args(vision, **flag) | parallel
                engines.append(
                    Engine(
                        runner, layout, arguments, environment, graphs, encoding_ranks
                    )
                )
    return engines


def _runners() -> dict[str, dict[str, str]]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {"V1": {}}
    return {f"V{1 + new}": {"VLLM_USE_V2_MODEL_RUNNER": str(new)} for new in range(2)}


def why_no_ray() -> str | None:
    """Why no engine with vLLM's Ray executor can be started here; None: it can."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "vLLM has no Ray executor for the CPU"
    if find_spec("ray") is None:
        return "Ray is not installed; use pip install ray"
    return None


def _layouts(ranks: int) -> dict[str, tuple[dict[str, Any], int]]:
    """Arguments by name, with the number of ranks that encode."""
    data, weights = ({"mm_encoder_tp_mode": mode} for mode in ("data", "weights"))
    tensor = {"tensor_parallel_size": ranks}
    layouts = {"data": (tensor | data, ranks)}
    if why_no_ray() is None:
        ray = {"distributed_executor_backend": "ray"}
        layouts["ray"] = (tensor | data | ray, ranks)
    if ranks % 2 == 0:
        stages = data | {
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": ranks // 2,
            # With enforce_eager, vLLM's later stages on a CPU lack what a warm-up
            # makes.
            "enforce_eager": False,
        }
        layouts["stages"] = (stages, ranks // 2)
    layouts["weights"] = (tensor | weights, ranks)
    return layouts


def rows_of(engine: Engine, found: dict[str, Found]) -> Iterator[Row]:
    """What there is to say since `engine` was the last to be found."""
    if engine.graphs:
        yield compare_with_own_path(engine, found[engine.name])
    suffix = ", without the flag"
    name = engine.name.removesuffix(suffix)
    given, without = found.get(name), found.get(name + suffix)
    if given is not None and without is not None:
        yield {
            "engine": f"{name}, against one without the flag",
            **_equality(given["tokens"], without["tokens"]),
            **_by_rank(given),
            "problems": [] if not any(without["stats"]) else ["that one has graphs"],
        }


def compare_with_own_path(engine: Engine, found: Found) -> Row:
    """One engine's tokens and graphs."""
    row = {"engine": engine.name, **_by_rank(found)}
    row |= _equality(found["tokens"], found.get("tokens_of_own_path", []))
    graphs, hits = row["graphs_by_rank"], row["hits_by_rank"]
    encoding = engine.encoding_ranks
    problems = []
    if not all(graphs[:encoding]):
        problems.append("a rank that encodes has no graphs")
    if any(graphs[encoding:]):
        problems.append("a stage that encodes nothing has graphs")
    if not any(hits):
        problems.append("none was replayed")
    return row | {"problems": problems}


def _by_rank(found: Found) -> Row:
    return {
        f"{name}_by_rank": [stats[count] if stats else 0 for stats in found["stats"]]
        for name, count in (("graphs", "num_budgets"), ("hits", "graph_hits"))
    }


def _equality(tokens: list[list[int]], others: list[list[int]]) -> Row:
    equal = sum(a == b for a, b in zip(tokens, others))  # noqa: B905
    return {
        "equal_tokens": equal == len(tokens),
        "equal_prompts": f"{equal} of {len(tokens)} prompts",
    }
