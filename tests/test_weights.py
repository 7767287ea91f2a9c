# SPDX-License-Identifier: Apache-2.0
"""Whoever changes weights gets embeddings of the new ones, never of the old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.small_encoders import ARCHITECTURES, SmallEncoders, ordinary_images
from tests.support.variants import make_variant
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.integration import patches, runners
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.encoder_inputs import image_batch
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import eager_embeddings
from vllm_encoder_cg.weights import WeightWatch

GEMMA3 = "Gemma3ForConditionalGeneration"


@pytest.fixture(scope="module")
def shared(small_encoders: SmallEncoders) -> EncoderCudaGraphManager:
    return small_encoders.get(GEMMA3)


@pytest.fixture
def manager(
    shared: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> EncoderCudaGraphManager:
    """Captured for a model that other tests use too."""
    manager = make_variant(shared, monkeypatch, budgets=(16, 32))
    manager.capture()
    return manager


@pytest.fixture
def weight(shared: EncoderCudaGraphManager) -> Iterator[torch.nn.Parameter]:
    """One of the encoder's, put back afterwards."""
    projector = shared.model.multi_modal_projector
    before = projector.mm_input_projection_weight
    values = before.detach().clone()
    yield before
    projector.mm_input_projection_weight = before
    with torch.no_grad():
        before.copy_(values)


def make_inputs(manager: EncoderCudaGraphManager) -> dict[str, Any]:
    side = manager.model.config.vision_config.image_size
    return image_batch(manager.adapter, [(side, side)], 0)


def replace(manager: EncoderCudaGraphManager, weight: torch.nn.Parameter) -> None:
    """As code that has never heard of graphs does."""
    projector = manager.model.multi_modal_projector
    projector.mm_input_projection_weight = torch.nn.Parameter(weight.detach() * 2)


def test_written_weights_are_seen_by_the_next_replay(
    manager: EncoderCudaGraphManager, weight: torch.nn.Parameter
) -> None:
    mm_kwargs = make_inputs(manager)
    (before,) = manager.execute(mm_kwargs) or ()
    with torch.no_grad():
        weight.mul_(2)
    manager.check_weights(manager.model)
    (after,) = manager.execute(mm_kwargs) or ()
    (expected,) = eager_embeddings(manager.model, mm_kwargs)
    assert relative_norm(after, expected) < 1e-4
    assert relative_norm(after, before) > 0.5
    assert manager.stats.misses.total() == 0


@pytest.mark.parametrize("fused", ["off", "on"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_written_weight_is_seen(
    architecture: str,
    fused: str,
    small_encoders: SmallEncoders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No adapter keeps a copy of a weight, in whatever layout."""
    base = small_encoders.get(architecture)
    manager = make_variant(
        base, monkeypatch, budgets=base.token_budgets, fused=fused, cost_model=False
    )
    manager.capture()
    mm_kwargs = ordinary_images(manager)
    generator = torch.Generator().manual_seed(0)
    places = [p.tensor for p in manager._weights._places if p.tensor is not None]
    saved = [tensor.clone() for tensor in places]
    with torch.no_grad():
        for tensor in places:
            scale = 1 + 0.2 * torch.rand(tensor.shape, generator=generator)
            tensor.mul_(scale.to(tensor.dtype))
    try:
        outputs = manager.execute(mm_kwargs)
        expected = eager_embeddings(manager.model, mm_kwargs)
    finally:
        with torch.no_grad():
            for tensor, values in zip(places, saved, strict=True):
                tensor.copy_(values)
    assert outputs is not None and manager.stats.misses.total() == 0
    errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
    assert max(errors) < 1e-4
    before = small_encoders.expected(architecture)
    assert all(relative_norm(a, b) > 1e-3 for a, b in zip(outputs, before, strict=True))


def test_replaced_weights_drop_the_graphs_at_once(
    manager: EncoderCudaGraphManager,
    weight: torch.nn.Parameter,
    package_log: pytest.LogCaptureFixture,
) -> None:
    replace(manager, weight)
    manager.check_weights(manager.model)
    assert manager.execute(make_inputs(manager)) is None
    assert manager.stats.misses == {EagerReason.DROPPED_GRAPH: 1}
    assert manager.get_cumulative_stats()["num_budgets"] == 0
    assert manager._graphs.arena.nbytes() == 0
    (message,) = [r.getMessage() for r in package_log.records if r.levelname == "ERROR"]
    assert "multi_modal_projector.mm_input_projection_weight" in message
    assert "capture()" in message


def test_replaced_weights_are_noticed_without_being_told(
    manager: EncoderCudaGraphManager, weight: torch.nn.Parameter
) -> None:
    """By code that vLLM does not know of, while batches come."""
    mm_kwargs = make_inputs(manager)
    replace(manager, weight)
    batches = 1 + len(manager._weights) // 16
    outputs = [manager.execute(mm_kwargs) for _ in range(batches)]
    assert outputs[-1] is None


@pytest.mark.parametrize("whole_module", [False, True])
def test_capturing_again_reads_the_new_weights(
    manager: EncoderCudaGraphManager,
    weight: torch.nn.Parameter,
    whole_module: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if whole_module:
        other = make_other_tower(manager)
        monkeypatch.setitem(manager.model._modules, "vision_tower", other)
    else:
        replace(manager, weight)
    manager.check_weights()
    manager.capture()
    mm_kwargs = make_inputs(manager)
    (output,) = manager.execute(mm_kwargs) or ()
    (expected,) = eager_embeddings(manager.model, mm_kwargs)
    assert relative_norm(output, expected) < 1e-4


@pytest.mark.parametrize("cleared", [False, True])
def test_a_tower_replaced_since_is_the_one_that_is_captured(
    manager: EncoderCudaGraphManager, cleared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being told, or having encoded anything between."""
    if cleared:
        manager.clear()
    other = make_other_tower(manager)
    monkeypatch.setitem(manager.model._modules, "vision_tower", other)
    manager.capture()
    mm_kwargs = make_inputs(manager)
    (output,) = manager.execute(mm_kwargs) or ()
    (expected,) = eager_embeddings(manager.model, mm_kwargs)
    assert relative_norm(output, expected) < 1e-4


def make_other_tower(manager: EncoderCudaGraphManager) -> torch.nn.Module:
    """A tower of other weights, by way of an attribute that holds it."""
    tower = manager.model.vision_tower
    other = type("Other", (torch.nn.Module,), {"forward": lambda _, x: -tower(x)})()
    other.tower = tower
    return other


def test_another_model_in_the_runner_drops_the_graphs(
    manager: EncoderCudaGraphManager,
) -> None:
    manager.check_weights(torch.nn.Linear(2, 2))
    assert manager.execute(make_inputs(manager)) is None


def test_clearing_forgets_what_was_replaced(
    manager: EncoderCudaGraphManager, weight: torch.nn.Parameter
) -> None:
    replace(manager, weight)
    manager.clear()
    manager.check_weights()
    assert manager.execute(make_inputs(manager)) is None
    assert manager.stats.misses.total() == 0
    manager.capture()
    assert manager.execute(make_inputs(manager)) is not None


# -- What vLLM does to weights ------------------------------------------------------


class RunnerThatReplaces:
    """A V1 runner whose reloading makes new parameters."""

    def __init__(
        self, manager: EncoderCudaGraphManager, weight: torch.nn.Parameter
    ) -> None:
        self.encoder_cudagraph_manager = manager
        self._weight = weight

    def reload_weights(self) -> None:
        replace(self.encoder_cudagraph_manager, self._weight)


@pytest.mark.usefixtures("unregistered")
def test_graphs_are_compared_after_a_reload(
    manager: EncoderCudaGraphManager, weight: torch.nn.Parameter
) -> None:
    """The very next batch, as vLLM's workers are used."""
    from vllm.v1.worker.gpu_worker import Worker

    patches.activate_in_worker()
    worker = Worker.__new__(Worker)
    worker.vllm_config = manager.vllm_config
    worker.model_runner = RunnerThatReplaces(manager, weight)
    worker.model_runner.get_model = lambda: manager.model
    worker.reload_weights()
    assert manager.get_cumulative_stats()["num_budgets"] == 0
    assert manager.execute(make_inputs(manager)) is None


def test_a_comparison_that_fails_stops_nothing(
    manager: EncoderCudaGraphManager, package_log: pytest.LogCaptureFixture
) -> None:
    runner = SimpleNamespace(encoder_cudagraph_manager=manager)
    runners.check_weights(SimpleNamespace(model_runner=runner))  # has no model
    assert "Cannot tell whether" in package_log.text
    assert manager.execute(make_inputs(manager)) is not None


# -- What is watched -------------------------------------------------------------


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Linear(2, 2)
        self.newline = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("positions", torch.ones(1), persistent=False)
        self.language_model = torch.nn.Linear(2, 2)

    def get_language_model(self) -> torch.nn.Module:
        return self.language_model


def set_newline(model: Encoder) -> None:
    model.newline = torch.nn.Parameter(torch.ones(2))


def set_data(model: Encoder) -> None:
    model.tower.weight.data = torch.ones(2, 2)


def set_scale(model: Encoder) -> None:
    model.scale = torch.zeros(1)


def set_tower(model: Encoder) -> None:
    model.tower = torch.nn.Linear(2, 2)


def remove_bias(model: Encoder) -> None:
    model.tower.bias = None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (set_newline, "newline"),
        (set_data, "tower.weight"),
        (set_scale, "scale"),
        (set_tower, "tower"),
        (remove_bias, "tower.bias"),
    ],
)
def test_what_counts(change: Callable[[Encoder], None], name: str) -> None:
    model = Encoder()
    watch = WeightWatch(model)
    assert watch.find_replaced() is None
    change(model)
    assert watch.find_replaced() == name
    assert watch.glance() == name


def test_what_does_not_count() -> None:
    """Positions are replaced by larger ones; the text has graphs of its own."""
    model = Encoder()
    watch = WeightWatch(model)
    model.positions = torch.ones(4)
    model.language_model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.tower.weight.fill_(3)
    assert watch.find_replaced() is None


def test_graphs_never_read_memory_that_was_given_back() -> None:
    """Until a replacement is noticed, the weight before stays allocated."""
    model = Encoder()
    watch = WeightWatch(model)
    address = model.tower.weight.data_ptr()
    set_data(model)
    kept = [place.tensor for place in watch._places if place.tensor is not None]
    assert address in [tensor.data_ptr() for tensor in kept]


def test_a_glance_comes_round() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(100)])
    watch = WeightWatch(model)
    model[70].bias = torch.nn.Parameter(torch.zeros(1))
    glances = [watch.glance() for _ in range(1 + len(watch) // 16)]
    assert [name for name in glances if name] == ["70.bias"]


def test_a_model_of_any_kind_can_be_watched() -> None:
    watch = WeightWatch(object())
    assert len(watch) == 0
    assert watch.glance() is None and watch.find_replaced() is None
