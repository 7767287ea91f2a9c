# SPDX-License-Identifier: Apache-2.0
"""Which graphs are captured without running their forward before."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.toy_adapter import ToyAdapter, ToyModel
from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.definitions import BatchLimits, GraphKey
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.graphs import Forward, MakeOutput, StaticRecorder
from vllm_encoder_cg.ranks import EncoderMode, EncoderRanks
from vllm_encoder_cg.startup import capture
from vllm_encoder_cg.startup.capture import capture_graphs

LIMITS = BatchLimits(max_items=4, max_frames=0)
CPU = torch.device("cpu")


class Recorder(StaticRecorder):
    """Notes what was run before its capture, and fails without at some sizes."""

    def __init__(self, fails_at: set[int]) -> None:
        self.fails_at = fails_at
        self.recorded: list[tuple[int, bool]] = []

    def record(
        self, forward: Forward, make_output: MakeOutput, *, warm_up: bool = True
    ) -> Any:
        recorded = super().record(forward, make_output)
        rows = recorded[1].shape[0]
        self.recorded.append((rows, warm_up))
        if not warm_up and rows in self.fails_at:
            raise RuntimeError("a kernel is to be loaded")
        return recorded


class ByParity(ToyAdapter):
    def warm_up_key(self, shape: GraphShape) -> Hashable | None:
        return shape.capacity.tokens % 2


def record(
    patch: pytest.MonkeyPatch,
    adapter: type[ToyAdapter],
    budgets: list[int],
    *,
    fails_at: set[int] = frozenset(),  # type: ignore[assignment]
    mode: EncoderMode = EncoderMode.SINGLE,
) -> tuple[GraphSet, list[tuple[int, bool]]]:
    """The graphs, and (tokens, whether run before) of every attempt."""
    recorder = Recorder(fails_at)
    patch.setattr(capture, "make_recorder", lambda device, pool: recorder)
    toy = adapter(ToyModel(widths=(8,)), SimpleNamespace())
    keys = [GraphKey("whole", budget, (8,)) for budget in budgets]
    shapes = [GraphShape(key, toy.capacity(key, LIMITS)) for key in keys]
    graphs = capture_graphs(toy, shapes, LIMITS, CPU, None, EncoderRanks(mode))
    return graphs, recorder.recorded


def test_one_of_those_alike_is_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, recorded = record(monkeypatch, ByParity, [16, 12, 9, 8, 3])
    assert recorded == [(16, True), (12, False), (9, True), (8, False), (3, False)]
    assert len(graphs.graphs) == 5


def test_each_is_run_before_unless_its_adapter_says_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, recorded = record(monkeypatch, ToyAdapter, [16, 12, 8])
    assert recorded == [(16, True), (12, True), (8, True)]


def test_where_that_fails_all_are_captured_anew(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    graphs, recorded = record(monkeypatch, ByParity, [16, 14, 12, 10, 8], fails_at={12})
    assert recorded == [
        (16, True),
        (14, False),
        (12, False),
        *((tokens, True) for tokens in (16, 14, 12, 10, 8)),
    ]
    assert len(graphs.graphs) == 5 and not graphs.dropped
    assert "budget 12" in package_log.text and "to be loaded" in package_log.text


def test_forwards_that_communicate_are_all_run_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, recorded = record(monkeypatch, ByParity, [16, 12], mode=EncoderMode.WEIGHTS)
    assert recorded == [(16, True), (12, True)]
