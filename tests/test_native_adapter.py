# SPDX-License-Identifier: Apache-2.0
"""A model that implements vLLM's protocol, and has no adapter here, is driven."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.support.encoders import Encoders
from tests.support.native_model import HIDDEN, PATCH, NativeModel, UnlikeEager
from tests.support.toy_adapter import make_toy_config
from tests.support.variants import make_variant
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.native_adapter import NativeProtocolAdapter
from vllm_encoder_cg.protocol import SupportsEncoderCudaGraph
from vllm_encoder_cg.samples.encoder_inputs import image_batch
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import eager_embeddings


def make_manager(model: Any, *budgets: int, **settings: Any) -> EncoderCudaGraphManager:
    config = make_toy_config(encoder_cudagraph_token_budgets=list(budgets))
    config.additional_config["encoder_cg"].update(settings)
    config.model_config.dtype = torch.float32
    manager = EncoderCudaGraphManager(config, torch.device("cpu"), torch.float32, model)
    manager.capture()
    return manager


@pytest.fixture
def manager() -> EncoderCudaGraphManager:
    return make_manager(NativeModel())


def make_images(*patches: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(sum(patches), PATCH, generator=generator),
        "image_patches": torch.tensor(patches),
    }


def compare(manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]) -> int:
    """Replays that a batch took; its outputs equal the model's own."""
    before = manager.stats.replays.total()
    outputs = manager.execute(mm_kwargs)
    assert outputs is not None
    expected = eager_embeddings(manager.model, mm_kwargs)
    for output, reference in zip(outputs, expected, strict=True):
        assert relative_norm(output, reference) < 1e-4
    return manager.stats.replays.total() - before


def test_it_is_driven_by_its_protocol(manager: EncoderCudaGraphManager) -> None:
    assert isinstance(manager.model, SupportsEncoderCudaGraph)
    assert type(manager.adapter) is NativeProtocolAdapter
    assert manager.is_captured() and manager.active
    assert manager.supports_modality("image")
    assert not manager.supports_modality("video")
    assert manager.token_budgets[0] == 4 and manager.token_budgets[-1] == 64


def test_batches_equal_eager(manager: EncoderCudaGraphManager) -> None:
    assert compare(manager, make_images(2)) == 1
    assert compare(manager, make_images(128)) == 1
    assert compare(manager, make_images(40, 2, 16, 8)) == 1
    assert compare(manager, make_images(100, 90, 80, 2)) > 1
    generator = random.Random(0)
    for seed in range(20):
        sizes = [2 * generator.randint(1, 40) for _ in range(generator.randint(1, 9))]
        compare(manager, make_images(*sizes, seed=seed))
    assert manager.stats.misses.total() == 0


def test_above_every_budget_is_eager(manager: EncoderCudaGraphManager) -> None:
    assert manager.execute(make_images(130)) is None
    assert compare(manager, make_images(130, 4, 160)) == 1
    assert manager.stats.misses == {EagerReason.ABOVE_EVERY_BUDGET: 3}


def test_buffers_of_all_its_graphs_keep_within_the_memory_limit() -> None:
    """Each graph has its own, unlike those that an adapter drives."""
    budgets = (4, 8, 16, 32, 64)
    per_token = 2 * PATCH * 4  # two patches of float32
    output_bytes = max(budgets) * HIDDEN * 4
    limit = per_token * max(budgets) + output_bytes + 1000  # room for the largest one
    manager = make_manager(NativeModel(), *budgets, memory_limit_gib=limit / 2**30)
    captured = {key.token_budget for key in manager._graphs.graphs}
    assert captured == {4, 8, 16, 32}
    assert per_token * sum(budgets) + output_bytes > limit
    assert compare(manager, make_images(40)) == 1
    assert manager.execute(make_images(100)) is None
    assert manager.get_cumulative_stats()["dropped_graphs"] == []


def test_outputs_stay_as_they_are(manager: EncoderCudaGraphManager) -> None:
    outputs = manager.execute(make_images(8, 4))
    assert outputs is not None
    copies = [output.clone() for output in outputs]
    compare(manager, make_images(8, 4, seed=1))
    assert all(map(torch.equal, outputs, copies))


def test_embeddings_go_to_the_model(manager: EncoderCudaGraphManager) -> None:
    assert manager.execute({"image_embeds": torch.zeros(2, 8)}) is None


def test_a_graph_unlike_eager_is_dropped_at_its_first_batch(
    package_log: pytest.LogCaptureFixture,
) -> None:
    """The protocol makes no sample input, so nothing is known before.  What eager
    gave instead counts as such."""
    manager = make_manager(UnlikeEager(), 8, 16)
    for graphs_left in (1, 0):
        assert compare(manager, make_images(4, 4)) == 0
        assert manager.get_cumulative_stats()["num_budgets"] == graphs_left
    assert "UnlikeEager differs from eager" in package_log.text
    assert manager.execute(make_images(4, 4)) is None
    assert manager.stats.misses == {EagerReason.DROPPED_GRAPH: 6}
    assert (manager.stats.hits, manager.stats.eager_calls) == (0, 3)


def test_a_model_without_any_support_is_left_alone() -> None:
    manager = make_manager(torch.nn.Linear(2, 2))
    assert not manager.active and not manager.is_captured()
    assert manager.inactive_reason is not None
    assert not manager.supports_modality("image")
    assert manager.execute(make_images(4)) is None


def test_a_model_that_cannot_describe_itself_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: NativeModel) -> None:
        raise AttributeError("no vision tower")

    monkeypatch.setattr(NativeModel, "get_encoder_cudagraph_config", fail)
    manager = make_manager(NativeModel())
    assert manager.inactive_reason is not None
    assert "no vision tower" in manager.inactive_reason


def test_vllm_s_own_internvl(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's protocol instead of by the adapter for it."""
    adapted = encoders.get("InternVLChatModel").manager
    manager = make_variant(
        adapted, monkeypatch, adapter=NativeProtocolAdapter, budgets=()
    )
    manager.capture()
    assert manager.is_captured()
    side = adapted.model.config.vision_config.image_size
    sizes = [(side, side), (2 * side, side), (3 * side, 2 * side)]
    for seed in range(3):
        compare(manager, image_batch(adapted.adapter, sizes, seed))
    assert manager.stats.hits > 0
    assert manager.get_cumulative_stats()["dropped_graphs"] == []
