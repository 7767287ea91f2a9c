# SPDX-License-Identifier: Apache-2.0
"""Encoders on two and four ranks, over gloo: equal to one rank's, never stuck."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.native_model import NativeModel
from tests.support.rank_encoders import (
    BATCHES,
    DEEPSEEK,
    INTERNVL,
    QWEN3,
    STEP3,
    encode_on_rank,
    write_references,
)
from tests.support.rank_faults import (
    TOY_ITEMS,
    UNEVEN,
    end_on_rank,
    fail_out_of_step,
    faults_on_rank,
)
from tests.support.rank_outcomes import Outcome
from tests.support.toy_adapter import make_toy_config
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.native_adapter import NativeProtocolAdapter
from vllm_encoder_cg.samples.rank_processes import RankError, run_on_ranks

RANKS = 2
TOLERANCE = 1e-4
ENCODERS = [
    (QWEN3, "data"),
    (QWEN3, "weights"),
    (INTERNVL, "data"),
    (INTERNVL, "weights"),
    (STEP3, "data"),
    (DEEPSEEK, "weights"),  # vLLM has no other mode for it
]

Outcomes = list[dict[Any, Any]]
"""By rank."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Every batch of every encoder, on all ranks."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    run_on_ranks(write_references, 1, folder)
    return run_on_ranks(encode_on_rank, RANKS, folder, ENCODERS)


@pytest.fixture(scope="module")
def faults() -> Outcomes:
    """Everything that a rank does unlike the others and survives."""
    return run_on_ranks(faults_on_rank, RANKS, timeout_s=300)


@pytest.fixture(scope="module")
def faults_of_four() -> Outcomes:
    """The part of it that might go well with two ranks only."""
    names = ("uneven", "cannot start", "capture fails", "batch fails", "late")
    return run_on_ranks(faults_on_rank, 4, names, timeout_s=300)


@pytest.fixture(params=["faults", "faults_of_four"])
def some_faults(request: pytest.FixtureRequest) -> Outcomes:
    """Of two ranks, then of four."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("architecture", "mode", "batch"),
    [(a, mode, batch) for a, mode in ENCODERS for batch in BATCHES[a]],
)
def test_equals_a_single_rank(
    architecture: str, mode: str, batch: str, outcomes: Outcomes
) -> None:
    count = len(BATCHES[architecture][batch].items)
    by_rank: list[Outcome] = [of[architecture, mode, batch] for of in outcomes]
    # So do the weights that each rank drew.
    assert max(outcome.model_error for outcome in by_rank) < TOLERANCE
    if mode == "weights" and batch == "eagerly only":
        assert all(outcome.error is None for outcome in by_rank)
        return
    for outcome in by_rank:
        assert outcome.error is not None and outcome.error < TOLERANCE
    eager = int(batch in ("above every budget", "eagerly only"))
    if mode == "weights":
        assert all(o.replayed == count - eager and o.eager == eager for o in by_rank)
    else:
        assert sum(outcome.eager for outcome in by_rank) == eager
        assert sum(outcome.replayed for outcome in by_rank) == count - eager
        own = [outcome.replayed + outcome.eager for outcome in by_rank]
        assert min(own) >= (1 if count > 1 else 0)


@pytest.mark.parametrize(("architecture", "mode"), ENCODERS[:4])
def test_fused_equals_a_single_rank(
    architecture: str, mode: str, outcomes: Outcomes
) -> None:
    """Sharded linears keep their own forward, which communicates."""
    for of in outcomes:
        outcome = of[architecture, mode, "fused"]
        assert outcome.error is not None and outcome.error < TOLERANCE
        assert outcome.replayed and not outcome.eager


@pytest.mark.parametrize(("architecture", "mode"), ENCODERS)
def test_outputs_stay_as_they_are(
    architecture: str, mode: str, outcomes: Outcomes
) -> None:
    assert not any(of[architecture, mode, "changed"] for of in outcomes)


def test_a_huge_item_has_a_rank_to_itself(outcomes: Outcomes) -> None:
    own = [of[QWEN3, "data", "one huge, many small"].replayed for of in outcomes]
    assert own == [1, 6]


@pytest.mark.parametrize("mode", ["data", "weights"])
def test_embeddings_go_to_the_model_on_all_ranks(mode: str, outcomes: Outcomes) -> None:
    assert not any(of[QWEN3, mode, "embeddings taken"] for of in outcomes)


each_mode = pytest.mark.parametrize("mode", ["data", "weights"])


def assert_right(by_rank: list[Outcome], *, encoded: bool = True) -> None:
    """All ranks encoded the batch right, or all left it to the model."""
    assert all((outcome.error is not None) == encoded for outcome in by_rank)
    assert all((outcome.error or 0.0) < TOLERANCE for outcome in by_rank)


@each_mode
def test_toy_equals_a_single_rank(mode: str, faults: Outcomes) -> None:
    for by_rank in zip(*(of[f"{mode}: nothing"] for of in faults), strict=True):
        assert_right(by_rank)
        items = [outcome.replayed + outcome.eager for outcome in by_rank]
        assert sum(items) == len(TOY_ITEMS) * (1 if mode == "data" else RANKS)


@each_mode
@pytest.mark.parametrize("batch", UNEVEN)
def test_uneven_batches(mode: str, batch: str, some_faults: Outcomes) -> None:
    """With fewer items than ranks too, and where ranks have nothing by graph."""
    by_rank = [of[f"{mode}: uneven"][batch] for of in some_faults]
    # Sharded, a batch without a graph is the model's own.
    given = mode == "data" or batch not in ("eagerly only", "one eagerly")
    assert_right(by_rank, encoded=given)
    if not given:
        return
    items = sorted(outcome.replayed + outcome.eager for outcome in by_rank)
    count = len(UNEVEN[batch])
    if mode == "weights":
        assert items == [count] * len(some_faults)
        return
    assert sum(items) == count
    if count <= len(some_faults):
        assert items == [0] * (len(some_faults) - count) + [1] * count
    if batch == "one huge, many small":
        assert items[0] == 1


@each_mode
def test_one_rank_alone_does_not_stay_without_graphs(
    mode: str, some_faults: Outcomes
) -> None:
    """All ranks know why, and none waits for it in a capture."""
    by_rank = [of[f"{mode}: cannot start"] for of in some_faults]
    assert_right([result["outcome"] for result in by_rank], encoded=False)
    (reason,) = {result["reason"] for result in by_rank}
    last = len(some_faults) - 1
    assert reason.startswith(
        f"rank {last} of {len(some_faults)} cannot use them, so no "
    )
    assert reason.endswith("RuntimeError: out of luck")


@each_mode
def test_a_wrong_setting_is_raised_where_it_is_wrong(
    mode: str, faults: Outcomes
) -> None:
    first, *others = (of[f"{mode}: wrong setting"] for of in faults)
    assert first.startswith("raised: ") and "trace_file: got" in first
    reason = first.removeprefix("raised: ")
    assert all(other.startswith("rank 0 of ") for other in others)
    assert all(other.endswith(reason) for other in others)


@each_mode
def test_a_graph_that_fails_on_one_rank(mode: str, some_faults: Outcomes) -> None:
    by_rank = [of[f"{mode}: capture fails"] for of in some_faults]
    dropped = 2 * 2  # two paths, two widths
    of_others = 0 if mode == "data" else dropped
    expected = [*[of_others] * (len(some_faults) - 1), dropped]
    assert [result["dropped"] for result in by_rank] == expected
    assert_right([result["outcome"] for result in by_rank])


@each_mode
def test_a_rank_without_any_graph(mode: str, faults: Outcomes) -> None:
    by_rank = [of[f"{mode}: every capture fails"] for of in faults]
    captured = mode == "data"
    assert all(result["captured"] == captured for result in by_rank)
    assert by_rank[-1]["graphs"] == 0
    assert (by_rank[0]["graphs"] > 0) == captured
    assert_right([result["outcome"] for result in by_rank], encoded=captured)


@each_mode
def test_a_graph_that_differs_on_one_rank(mode: str, faults: Outcomes) -> None:
    by_rank = [of[f"{mode}: check fails"] for of in faults]
    dropped = [result["dropped"] for result in by_rank]
    assert dropped[-1] == 2 * 2
    assert dropped[0] == (0 if mode == "data" else 2 * 2)
    assert_right([result["outcome"] for result in by_rank])


@each_mode
def test_a_difference_on_one_rank_stops_the_start_on_all(
    mode: str, faults: Outcomes
) -> None:
    for message in (of[f"{mode}: check stops the start"] for of in faults):
        assert "differs from eager" in message and "on_mismatch" in message


@each_mode
def test_a_batch_that_raises_goes_to_the_model_on_all_ranks(
    mode: str, some_faults: Outcomes
) -> None:
    by_rank = [of[f"{mode}: batch fails"] for of in some_faults]
    for number, outcomes in enumerate(zip(*by_rank, strict=True)):
        assert_right(outcomes, encoded=number % 2 == 1)


def test_a_rank_that_is_always_late_has_less_to_do(some_faults: Outcomes) -> None:
    """The others would wait for it; all ranks expect the same of it, though one of
    them failed meanwhile."""
    by_rank = [of["data: late"] for of in some_faults]
    for number, outcomes in enumerate(zip(*by_rank, strict=True)):
        assert_right(outcomes, encoded=number != 1)
    items = [[each.replayed + each.eager for each in of] for of in by_rank]
    assert items[-1][0] > 0
    assert items[-1][-1] == 0
    assert sum(of[-1] for of in items) == len(TOY_ITEMS)


@each_mode
def test_each_item_is_counted_once(mode: str, faults: Outcomes) -> None:
    """By one rank where they share items, else by each; failed ones, too."""
    by_rank = [of[f"{mode}: counts"] for of in faults]
    times = 1 if mode == "data" else RANKS
    assert sum(counts["items"] for counts in by_rank) == 2 * len(TOY_ITEMS) * times
    assert sum(counts["failed"] for counts in by_rank) == len(TOY_ITEMS) * times
    assert sum(counts["batches"] for counts in by_rank) == 2 * times
    if mode == "weights":
        assert by_rank[0] == by_rank[1]


def test_a_wrong_shape_on_one_rank_reaches_no_one(faults: Outcomes) -> None:
    for by_rank in zip(*(of["data: wrong shape"] for of in faults), strict=True):
        assert_right(by_rank, encoded=False)


@each_mode
def test_an_observer_that_raises_changes_nothing(mode: str, faults: Outcomes) -> None:
    assert_right([of[f"{mode}: observer fails"] for of in faults])


@each_mode
def test_stale_weights_on_one_rank_keep_the_ranks_in_step(
    mode: str, faults: Outcomes
) -> None:
    """Graphs that read replaced weights serve on no rank; none waits for another."""
    by_rank = [of[f"{mode}: stale weights"] for of in faults]
    for number, outcomes in enumerate(zip(*by_rank, strict=True)):
        assert_right(outcomes, encoded=number == 0)


def test_a_rank_that_ends_is_an_error_on_the_others() -> None:
    with pytest.raises(RankError, match="rank 1 ended without a result"):
        run_on_ranks(end_on_rank, RANKS, "data", timeout_s=120)


def test_a_sharded_encoder_out_of_step_is_an_error_in_time() -> None:
    first, last = run_on_ranks(fail_out_of_step, RANKS, timeout_s=120)
    assert first.startswith("OutOfStepError") and "has ended" in first
    assert last.startswith("OutOfStepError") and "behind by more than 2 s" in last


@pytest.mark.parametrize("mode", ["data", "weights"])
def test_a_model_without_adapter_shares_no_items(mode: str) -> None:
    config = make_toy_config()
    config.model_config.dtype = torch.float32
    config.model_config.multimodal_config.mm_encoder_tp_mode = mode
    config.parallel_config.tensor_parallel_size = 2
    reason = NativeProtocolAdapter(NativeModel(), config).unsupported_reason()
    assert (reason is not None and "--mm-encoder-tp-mode" in reason) == (mode == "data")


@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_pipeline_stage_captures(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_toy_config(encoder_cudagraph_token_budgets=[4])
    config.model_config.dtype = torch.float32
    config.parallel_config.pipeline_parallel_size = 2
    monkeypatch.setattr(
        "vllm.distributed.get_pp_group", lambda: SimpleNamespace(is_first_rank=first)
    )
    manager = EncoderCudaGraphManager(
        config, torch.device("cpu"), torch.float32, NativeModel()
    )
    manager.capture()
    assert manager.active == manager.is_captured() == first
    assert (manager.get_num_graphs_to_capture() > 0) == first
    if not first:
        assert "first pipeline stage" in str(manager.inactive_reason)
        assert not manager.supports_modality("image")
        assert manager.execute({}) is None
