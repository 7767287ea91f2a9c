# SPDX-License-Identifier: Apache-2.0
"""Several encoders on ranks in one go, as ranks take long to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.multi_gpu.results import NOT_BEGUN, Results, TimeLimit
from benchmarks.multi_gpu.setup import Encoder


def run_encoders(
    part: str,
    function: Callable[..., Any],
    ranks: int,
    encoders: Sequence[Encoder],
    results: Results,
    limit: TimeLimit,
    *arguments: Any,
) -> None:
    """Calls ``function(rank, ranks, encoders, results, *arguments)`` on each rank,
    which adds rows with the name of an encoder when it is done with it.

    An encoder at which that fails is named, and those behind it are run by new ranks.
    """
    from vllm_encoder_cg.samples.rank_processes import RankError, run_on_ranks

    left = list(encoders)
    while left:
        if limit.is_up:
            for encoder in left:
                results.add_problem(part, str(encoder), NOT_BEGUN)
            return
        before = len(results.rows())
        try:
            run_on_ranks(
                function, ranks, left, results, *arguments, timeout_s=limit.of_step
            )
            return
        except RankError as error:
            done = {row.get("encoder") for row in results.rows()[before:]}
            failed = next((each for each in left if str(each) not in done), left[-1])
            results.add_problem(part, str(failed), str(error)[-3000:])
            left = left[left.index(failed) + 1 :]
