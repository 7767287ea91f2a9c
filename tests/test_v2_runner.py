# SPDX-License-Identifier: Apache-2.0
"""The V2 model runner, which needs Triton and so no CPU test can run whole.

Its module ``model_states.interface`` decides about the manager, and its
``EncoderRunner`` uses it; both are vLLM's own here, on the CPU.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from tests.support.fakes import FakeManager, ModelWithAdapter, ModelWithout
from vllm_encoder_cg.integration import entry_point, patches

INTERFACE = "vllm.v1.worker.gpu.model_states.interface"
HIDDEN_SIZE = 8


def _import_afresh() -> ModuleType:
    """The module as a process gets it that imports it only now."""
    spec = importlib.util.find_spec(INTERFACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, unregistered: None) -> None:
    def find_adapter(model: Any) -> type | None:
        return object if isinstance(model, ModelWithAdapter) else None

    monkeypatch.setitem(
        sys.modules,
        "vllm_encoder_cg.manager",
        SimpleNamespace(EncoderCudaGraphManager=FakeManager),
    )
    monkeypatch.setitem(
        sys.modules,
        "vllm_encoder_cg.models.registry",
        SimpleNamespace(find_adapter=find_adapter),
    )


@pytest.fixture(params=["imported first", "imported later"])
def interface(request: pytest.FixtureRequest) -> ModuleType:
    """The V2 module, with its names bound before or after ours took their place."""
    importlib.import_module(INTERFACE)
    entry_point.register()
    patches.activate_in_worker()
    if request.param == "imported first":
        return sys.modules[INTERFACE]
    return _import_afresh()


class _Encoder(torch.nn.Module):
    """Encodes an image of n pixels as n rows of its own mark."""

    def embed_multimodal(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        return [torch.full((len(image), HIDDEN_SIZE), -1.0) for image in pixel_values]


class _AdaptedEncoder(_Encoder, ModelWithAdapter):
    pass


class _OtherEncoder(_Encoder, ModelWithout):
    pass


def _make_state(
    interface: ModuleType,
    model: torch.nn.Module,
    *,
    cudagraph_mm_encoder: bool = True,
    enforce_eager: bool = False,
) -> Any:
    """vLLM's ``ModelState``, as the V2 runner creates it."""
    state_class: Any = type("State", (interface.ModelState,), {})
    state_class.__abstractmethods__ = frozenset()
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            enforce_eager=enforce_eager,
            dtype=torch.float32,
            max_model_len=64,
            get_inputs_embeds_size=lambda: HIDDEN_SIZE,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(cudagraph_mm_encoder=cudagraph_mm_encoder),
        observability_config=None,
    )
    cache = SimpleNamespace(mm_features={}, encoder_outputs={})
    return state_class(config, model, cache, torch.device("cpu"))


def test_names_are_ours(interface: ModuleType) -> None:
    assert interface.EncoderCudaGraphManager is FakeManager
    assert interface.supports_encoder_cudagraph(_AdaptedEncoder())
    assert not interface.supports_encoder_cudagraph(_OtherEncoder())


def test_a_model_with_an_adapter_gets_our_manager(interface: ModuleType) -> None:
    model = _AdaptedEncoder()
    manager = _make_state(interface, model).encoder_runner.cudagraph_manager
    assert isinstance(manager, FakeManager)
    assert manager.model is model


def test_a_model_that_nobody_supports_gets_none(interface: ModuleType) -> None:
    state = _make_state(interface, _OtherEncoder())
    assert state.encoder_runner.cudagraph_manager is None


@pytest.mark.parametrize(
    "settings", [{"cudagraph_mm_encoder": False}, {"enforce_eager": True}], ids=str
)
def test_no_manager_where_the_user_wants_none(
    interface: ModuleType, settings: dict[str, bool]
) -> None:
    state = _make_state(interface, _AdaptedEncoder(), **settings)
    assert state.encoder_runner.cudagraph_manager is None


def test_a_model_that_vllm_supports_keeps_its_support(interface: ModuleType) -> None:
    from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph

    class Native(SupportsEncoderCudaGraph):
        pass

    assert interface.supports_encoder_cudagraph(Native())


class TestEncoderRunner:
    """vLLM's encoder runner, with our manager in it."""

    @pytest.fixture
    def runner(self, interface: ModuleType) -> Any:
        return _make_state(interface, _AdaptedEncoder()).encoder_runner

    @staticmethod
    def _image(pixels: int) -> tuple[str, MultiModalKwargsItem]:
        element = MultiModalFieldElem(
            data=torch.zeros(pixels), field=MultiModalBatchedField()
        )
        return "image", MultiModalKwargsItem({"pixel_values": element})

    def test_what_the_manager_returns_is_used(self, runner: Any) -> None:
        manager = runner.cudagraph_manager
        manager.capture(None)
        manager.outputs = [torch.ones(3, HIDDEN_SIZE), torch.zeros(3, HIDDEN_SIZE)]
        outputs = runner.execute_mm_encoder([self._image(3), self._image(3)])
        assert torch.equal(outputs[0], manager.outputs[0])
        assert torch.equal(outputs[1], manager.outputs[1])

    def test_none_means_eager(self, runner: Any) -> None:
        runner.cudagraph_manager.capture(None)
        (output,) = runner.execute_mm_encoder([self._image(3)])
        assert runner.cudagraph_manager.calls == ["capture", "execute"]
        assert torch.equal(output, torch.full((3, HIDDEN_SIZE), -1.0))

    def test_before_capture_the_manager_is_not_asked(self, runner: Any) -> None:
        runner.execute_mm_encoder([self._image(3)])
        assert runner.cudagraph_manager.calls == []

    def test_clear_reaches_the_manager(self, runner: Any) -> None:
        runner.cudagraph_manager.capture(None)
        runner.clear()
        assert not runner.cudagraph_manager.is_captured()
