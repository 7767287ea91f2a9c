# SPDX-License-Identifier: Apache-2.0
"""A graph that differs from eager is found at start-up and never serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.encoders import Encoders
from tests.support.variants import (
    AttendsAcrossImages,
    KeepsStaleGrids,
    ReadsPadding,
    SwapsItems,
    make_variant,
)
from vllm_encoder_cg.adapter import EncoderAdapter, GraphShape
from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.encoder_inputs import image_batch
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.startup.self_check import (
    compare_items,
    keys_to_check,
)

FAULTS = [AttendsAcrossImages, KeepsStaleGrids, SwapsItems]


@pytest.fixture(scope="module")
def sound(encoders: Encoders) -> EncoderCudaGraphManager:
    return encoders.get("Qwen3VLForConditionalGeneration").manager


def test_a_sound_encoder_passes(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_variant(sound, monkeypatch, on_mismatch="raise")
    manager.capture()
    assert manager.get_cumulative_stats()["num_budgets"] == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_its_graphs_dropped(
    fault: type[EncoderAdapter],
    sound: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    manager = make_variant(sound, monkeypatch, adapter=fault)
    manager.capture()
    assert not manager.is_captured()
    assert manager.execute(image_batch(sound.adapter, [(64, 64)] * 2, 0)) is None
    errors = [r.getMessage() for r in package_log.records if r.levelname == "ERROR"]
    assert len(errors) == 2
    assert "budget 256" in errors[0] or "budget 256" in errors[1]
    for error in errors:
        assert "Qwen3VLForConditionalGeneration differs from eager by" in error
        assert "TORCH_SDPA" in error and 'on_mismatch to "raise"' in error


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_start_where_that_is_set(
    fault: type[EncoderAdapter],
    sound: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_variant(sound, monkeypatch, adapter=fault, on_mismatch="raise")
    with pytest.raises(RuntimeError, match=r"differs from eager.*on_mismatch"):
        manager.capture()
    assert not manager.is_captured()


def test_a_check_that_raises_drops_the_graph(
    sound: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    manager = make_variant(sound, monkeypatch)

    def fail(*_: object) -> None:
        raise RuntimeError("no eager forward today")

    monkeypatch.setattr(manager.adapter, "eager", fail)
    manager.capture()
    assert not manager.is_captured()
    assert "no eager forward today" in package_log.text


def test_without_the_check_a_fault_is_not_found(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the setting is for: quick starts with graphs that are known."""
    manager = make_variant(sound, monkeypatch, adapter=SwapsItems, self_check=False)
    manager.capture()
    assert manager.is_captured()


def test_padding_that_is_read_is_found(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_variant(sound, monkeypatch, adapter=ReadsPadding)
    manager.capture()
    assert not manager.is_captured()


def test_relative_norm() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_norm(reference, reference) == 0
    assert relative_norm(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert relative_norm(torch.zeros(3), reference) == float("inf")
    assert relative_norm(torch.tensor([3.0, float("nan")]), reference) == float("inf")
    assert relative_norm(torch.tensor([3.0, float("inf")]), reference) == float("inf")


def test_a_small_item_does_not_hide_among_large_ones(
    sound: EncoderCudaGraphManager,
) -> None:
    adapter, key = sound.adapter, GraphKey("default", 64)
    large, small = torch.full((1000, 8), 10.0), torch.ones(1, 8)
    assert compare_items(adapter, key, [large, small], [large, small]) is None
    mismatch = compare_items(adapter, key, [large, -small], [large, small])
    assert mismatch is not None and mismatch.error == pytest.approx(2)
    together = torch.cat([large, -small]), torch.cat([large, small])
    assert relative_norm(*together) < 1e-2


def test_checked_graphs_cover_paths_axes_and_both_ends() -> None:
    keys = [
        GraphKey(path, budget, (axis,))
        for path in ("global", "local")
        for axis in (1, 2)
        for budget in range(10, 200, 10)
    ]
    chosen = keys_to_check(keys)
    assert len(chosen) < len(keys) / 3
    for path in ("global", "local"):
        for axis in (1, 2):
            budgets = [k.token_budget for k in chosen if k.path == path]
            assert {10, 190} <= set(budgets)
            assert any(k.axis_keys == (axis,) for k in chosen if k.path == path)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_all_graphs_leaves_none_that_was_not_compared(
    fault: type[EncoderAdapter],
    sound: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budgets = range(64, 257, 32)
    assert len(keys_to_check([GraphKey("default", b) for b in budgets])) < len(budgets)
    manager = make_variant(sound, monkeypatch, adapter=fault, budgets=tuple(budgets))
    manager.capture()
    assert not manager.is_captured()


def test_a_sound_graph_stays_beside_one_that_differs(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the group are compared then, and each is judged by itself."""
    manager = make_variant(sound, monkeypatch, budgets=tuple(range(64, 257, 32)))
    fill = manager.adapter.fill

    def fill_wrongly(batch: Any, indices: Any, buffers: Any, shape: GraphShape) -> None:
        fill(batch, indices, buffers, shape)
        if shape.key.token_budget == 256:
            buffers["pixels"].zero_()

    monkeypatch.setattr(manager.adapter, "fill", fill_wrongly)
    manager.capture()
    stats = manager.get_cumulative_stats()
    assert stats["num_budgets"] == 6 and len(stats["dropped_graphs"]) == 1
    assert manager.largest_budget() == 224
    assert manager.describe_graphs() == "6 graphs for 64 to 224 tokens"
