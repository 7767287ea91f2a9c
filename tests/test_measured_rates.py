# SPDX-License-Identifier: Apache-2.0
"""What items are shared over ranks by: a token's time, and attention's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.encoders import Encoders
from vllm_encoder_cg.adapter import EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import EncoderItemSpec, GraphCapacity, GraphKey
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.planning.sharding import attention_work
from vllm_encoder_cg.ranks import EncoderMode, EncoderRanks
from vllm_encoder_cg.startup import measurement

PER_REPLAY, PER_TOKEN, PER_WORK = 2.0, 0.01, 1e-6
RANKS = EncoderRanks(EncoderMode.SINGLE)


@pytest.fixture
def manager(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> EncoderCudaGraphManager:
    """One whose replays take the times above, and nothing else."""
    times: list[float] = []

    def replay(
        graphs: GraphSet, key: GraphKey, adapter: Any, batch: Any, items: Sequence[int]
    ) -> None:
        work = sum(attention_work(batch.specs[i]) for i in items)
        times.append(PER_REPLAY + PER_TOKEN * key.token_budget + PER_WORK * work)

    def time(call: Callable[[], Any], ranks: EncoderRanks) -> float:
        call()
        return times[-1]

    monkeypatch.setattr(GraphSet, "replay", replay)
    monkeypatch.setattr(measurement, "_time", time)
    return encoders.get("Qwen3VLForConditionalGeneration").manager


def test_attention_is_told_from_the_rest(manager: EncoderCudaGraphManager) -> None:
    rates = measurement.measure_rates(manager.adapter, manager._graphs, RANKS)
    assert rates is not None
    budget = max(key.token_budget for key in manager._graphs.graphs)
    assert rates["default"].attention_ms == pytest.approx(PER_WORK)
    assert rates["default"].token_ms == pytest.approx(PER_TOKEN + PER_REPLAY / budget)


def test_a_path_without_graphs_has_no_rate(manager: EncoderCudaGraphManager) -> None:
    empty = GraphSet.empty(manager.device)
    assert measurement.measure_rates(manager.adapter, empty, RANKS) is None


def test_costs_are_measured_where_they_bend_and_follow_replays_beyond(
    manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays of 2 ms, 0.01 per token of the budget and 0.002 per token of the batch,
    for its attention; eager forwards of at least 14 ms."""
    keys = [GraphKey("default", budget) for budget in range(64, 16385, 64)]
    shapes = {key: GraphShape(key, GraphCapacity(key.token_budget, 8)) for key in keys}
    graphs = GraphSet(manager._graphs.arena, dict.fromkeys(keys), shapes)  # type: ignore[arg-type]

    class Sized:
        """An adapter whose sample is one item that fills the graph."""

        def cost_sample(self, shape: GraphShape) -> dict[str, int]:
            return {"tokens": shape.capacity.tokens}

        def parse(self, mm_kwargs: dict[str, int]) -> Any:
            tokens = mm_kwargs["tokens"]
            return EncoderBatch("image", [EncoderItemSpec(tokens, tokens)], {})

        def eager(self, batch: Any, indices: Sequence[int], path: str) -> float:
            return max(14.0, 3.0 + 0.012 * batch.specs[0].output_tokens)

    replayed: list[GraphKey] = []

    def replay(
        graphs: GraphSet, key: GraphKey, adapter: Any, batch: Any, items: Sequence[int]
    ) -> float:
        replayed.append(key)
        attention = 0.002 * batch.specs[0].output_tokens
        return 2.0 + 0.01 * key.token_budget + attention

    monkeypatch.setattr(GraphSet, "replay", replay)
    monkeypatch.setattr(
        measurement, "_time_in_turn", lambda calls, ranks: [call() for call in calls]
    )
    monkeypatch.setattr(measurement, "_time", lambda call, ranks: call())
    costs = measurement.measure_costs(Sized(), graphs, RANKS)  # type: ignore[arg-type]
    assert costs is not None
    assert {key for key in keys if key.token_budget <= 1024} <= set(replayed)
    assert len(set(replayed)) < 25 and max(k.token_budget for k in replayed) <= 4096
    for key in keys:
        tokens = key.token_budget
        full = 2.0 + 0.012 * tokens
        assert costs.replay_cost(key) == pytest.approx(full, rel=0.05)
        eager = max(14.0, 3.0 + 0.012 * tokens)
        assert 0.99 * eager < costs.eager_cost("default", tokens) < 1.06 * eager


def test_one_rank_shares_nothing(
    manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "measure_costs", lambda *_: None)
    measured = measurement.measure_encoder(manager.adapter, manager._graphs, RANKS)
    assert measured == (None, None)


def test_what_cannot_be_measured_stops_nothing(
    manager: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr(measurement, "measure_costs", fail)
    measured = measurement.measure_encoder(manager.adapter, manager._graphs, RANKS)
    assert measured == (None, None)
    assert "cannot be measured" in package_log.text
