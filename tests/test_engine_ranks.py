# SPDX-License-Identifier: Apache-2.0
"""An engine on two ranks, in processes of its own executor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.multi_gpu.engines import engine_args, make_checkpoint, make_job
from benchmarks.multi_gpu.processes import run_jobs
from benchmarks.multi_gpu.results import TimeLimit

pytestmark = pytest.mark.vllm_e2e

TWO_RANKS = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def test_tokens_equal_those_of_one_rank_without_graphs(tmp_path: Path) -> None:
    model = {"model": str(make_checkpoint(2, "small", tmp_path))}
    engines = {
        "one rank": engine_args("small") | model,
        "two ranks": engine_args("small", cudagraph_mm_encoder=True)
        | model
        | TWO_RANKS,
    }
    jobs = [
        make_job(name, arguments, ENVIRONMENT, tmp_path / f"{name}.json")
        for name, arguments in engines.items()
    ]
    found = {}
    for job, outcome in run_jobs(jobs, tmp_path, TimeLimit(900, 450)):
        assert outcome.error is None, outcome.error
        found[job.name] = json.loads((tmp_path / f"{job.name}.json").read_text())
    alone, both = found["one rank"], found["two ranks"]
    assert alone["stats"] == [None]
    assert both["tokens"] == both["tokens_of_own_path"] == alone["tokens"]
    assert all(stats["num_budgets"] > 0 for stats in both["stats"])
    hits = [stats["graph_hits"] for stats in both["stats"]]
    assert min(hits) > 0 and sum(hits) == sum(s["items"] for s in both["stats"])
