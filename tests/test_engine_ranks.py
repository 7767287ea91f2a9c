# SPDX-License-Identifier: Apache-2.0
"""An engine on two ranks, in processes of its own executor."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.multi_gpu.engines import GRAPHS, Job, engine_args, make_checkpoint, run

pytestmark = pytest.mark.vllm_e2e

TWO_RANKS = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
#: Two workers on any number of cores.
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def test_tokens_equal_those_of_one_rank_without_graphs(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(2, "small", tmp_path)
    args = engine_args("small") | {"model": str(checkpoint)}
    alone = run(Job("one rank", args, ENVIRONMENT), tmp_path)
    assert alone["stats"] == [None]
    both = run(Job("two ranks", args | TWO_RANKS | GRAPHS, ENVIRONMENT), tmp_path)
    assert both["tokens"] == alone["tokens"]
    assert all(stats["num_budgets"] > 0 for stats in both["stats"])
    hits = [stats["graph_hits"] for stats in both["stats"]]
    assert min(hits) > 0 and sum(hits) == sum(s["items"] for s in both["stats"])
