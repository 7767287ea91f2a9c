# SPDX-License-Identifier: Apache-2.0
"""Capture axes: one graph per budget and layout, also beside several paths."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.support.toy_adapter import (
    PATHS,
    ToyAdapter,
    ToyModel,
    encode_eagerly,
    make_items,
    make_toy_config,
)
from vllm_encoder_cg.adapter import EncoderBatch
from vllm_encoder_cg.definitions import EagerReason, GraphKey
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.planning.planner import Plan

BUDGETS = [2, 4, 8]


def make_manager(
    monkeypatch: pytest.MonkeyPatch,
    model: ToyModel | None = None,
    **compilation_config: Any,
) -> EncoderCudaGraphManager:
    compilation_config.setdefault("encoder_cudagraph_token_budgets", BUDGETS)
    monkeypatch.setattr(
        "vllm_encoder_cg.manager.adapt",
        lambda model, vllm_config: (ToyAdapter(model, vllm_config), None),
    )
    return EncoderCudaGraphManager(
        make_toy_config(**compilation_config),
        torch.device("cpu"),
        torch.float32,
        model or ToyModel(),
    )


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> EncoderCudaGraphManager:
    manager = make_manager(monkeypatch)
    manager.capture()
    return manager


def run(
    manager: EncoderCudaGraphManager, *items: tuple[int, int]
) -> tuple[EncoderBatch, Plan]:
    """Encodes items of (parts, width), compares, and returns what was planned."""
    seen: list[tuple[EncoderBatch, Plan]] = []
    manager.observer = lambda batch, plan, _: seen.append((batch, plan))
    mm_kwargs = make_items(*items, seed=len(items))
    manager.poison_buffers()
    outputs = manager.execute(mm_kwargs)
    expected = encode_eagerly(mm_kwargs)
    if outputs is None:
        assert all(
            step.key is None
            for s in seen[0][1].sub_batches
            for step in s.steps.values()
        )
    else:
        for output, reference in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, reference)
    return seen[0]


def test_one_graph_per_path_budget_and_layout(
    manager: EncoderCudaGraphManager,
) -> None:
    expected = {
        GraphKey(path, budget, (width,))
        for path in PATHS
        for budget in BUDGETS
        for width in (8, 4)
    }
    assert set(manager._graphs.graphs) == expected
    assert manager.get_num_graphs_to_capture() == len(expected)


def test_items_of_unlike_layouts_never_share_a_replay(
    manager: EncoderCudaGraphManager,
) -> None:
    batch, plan = run(manager, (2, 8), (1, 4), (0, 8), (3, 4), (1, 8))
    assert len(plan.sub_batches) < len(batch.specs)
    for sub_batch in plan.sub_batches:
        layouts = {batch.specs[i].axis_keys for i in sub_batch.indices}
        assert len(layouts) == 1
        for step in sub_batch.steps.values():
            assert step.key is not None and step.key.axis_keys in layouts


def test_a_layout_without_graphs_is_eager_and_its_neighbours_are_not(
    manager: EncoderCudaGraphManager,
) -> None:
    _, plan = run(manager, (1, 4), (2, 5), (0, 16), (1, 8))
    eager = [s for s in plan.sub_batches if s.eager_reasons]
    assert [s.indices for s in eager] == [(1, 2)]
    assert set(eager[0].eager_reasons.values()) == {EagerReason.UNCAPTURED_LAYOUT}
    assert all(step.key is None for step in eager[0].steps.values())
    assert manager.stats.hits == 2
    assert manager.stats.misses == {EagerReason.UNCAPTURED_LAYOUT: 2}


def test_a_batch_of_only_such_layouts_goes_to_the_model(
    manager: EncoderCudaGraphManager,
) -> None:
    assert manager.execute(make_items((1, 5), (0, 6))) is None


def test_a_path_above_its_budgets_is_eager_beside_the_other(
    manager: EncoderCudaGraphManager,
) -> None:
    _, plan = run(manager, (9, 4), (1, 4))
    by_indices = {s.indices: s for s in plan.sub_batches}
    large = by_indices[(0,)]
    assert large.steps["whole"].key == GraphKey("whole", 2, (4,))
    assert large.steps["parts"].eager is EagerReason.ABOVE_EVERY_BUDGET
    assert all(step.key is not None for step in by_indices[(1,)].steps.values())


def test_a_path_whose_graphs_of_a_layout_failed_is_eager_for_that_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager(monkeypatch, ToyModel(fails={("parts", 4)}))
    manager.capture()
    _, plan = run(manager, (2, 4), (2, 8), (0, 4))
    steps = {s.indices: s.steps for s in plan.sub_batches}
    of_width_8 = steps.pop((1,))
    assert all(step.key is not None for step in of_width_8.values())
    parts = [s["parts"] for s in steps.values() if "parts" in s]
    assert [step.eager for step in parts] == [EagerReason.DROPPED_GRAPH]
    assert all(s["whole"].key is not None for s in steps.values())


def test_more_items_than_one_replay_holds(manager: EncoderCudaGraphManager) -> None:
    _, plan = run(manager, *[(1, width) for width in (4, 8) * 7])
    assert all(not s.eager_reasons for s in plan.sub_batches)
    assert len(plan.sub_batches) > 2


def test_budgets_of_one_capacity_are_captured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager(
        monkeypatch,
        ToyModel(granularity=4),
        encoder_cudagraph_token_budgets=[1, 2, 3, 4, 5, 8],
    )
    manager.capture()
    assert {key.token_budget for key in manager._graphs.graphs} == {4, 8}
    run(manager, (3, 4), (5, 8), (0, 4))


def test_automatic_budgets_stay_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    widths = tuple(range(16, 0, -2))
    manager = make_manager(
        monkeypatch, ToyModel(widths=widths), encoder_cudagraph_token_budgets=[]
    )
    per_path = manager.get_num_graphs_to_capture() // len(PATHS)
    assert per_path <= manager.settings.max_graphs
    assert not [r for r in package_log.records if r.levelno >= logging.WARNING]


def test_many_graphs_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    make_manager(monkeypatch, encoder_cudagraph_token_budgets=list(range(1, 41)))
    warnings = [r for r in package_log.records if r.levelno == logging.WARNING]
    assert len(warnings) == len(PATHS)
    text = warnings[0].getMessage()
    assert "80 encoder CUDA graphs" in text and "more than 64" in text
    assert "encoder_cudagraph_token_budgets" in text


def test_the_layouts_with_graphs_are_named_once(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(monkeypatch)
    manager.capture()
    named = [r for r in package_log.records if "width: 8, 4" in r.getMessage()]
    assert len(named) == 1 and named[0].levelno == logging.INFO
