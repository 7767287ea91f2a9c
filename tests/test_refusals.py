# SPDX-License-Identifier: Apache-2.0
"""What cannot be captured is left to vLLM from the start, with a reason."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.small_encoders import ARCHITECTURES, SmallEncoders, ordinary_images
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.quantized_linears import quantization_refusal, rounds_input


def make_manager(base: EncoderCudaGraphManager, **changes: Any) -> Any:
    """Another manager for the model of `base`, under another configuration."""
    config = copy.copy(base.vllm_config)
    for name, value in changes.items():
        setattr(config, name, value)
    return EncoderCudaGraphManager(config, base.device, base.dtype, base.model)


def assert_left_to_vllm(manager: EncoderCudaGraphManager, *words: str) -> None:
    assert not manager.active and manager.get_num_graphs_to_capture() == 0
    assert all(word in (manager.inactive_reason or "") for word in words)
    assert not manager.supports_modality("image")
    manager.capture()
    assert not manager.is_captured()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lora_on_the_tower(architecture: str, small_encoders: SmallEncoders) -> None:
    """Its adapters follow the order of requests, which packing changes."""
    base = small_encoders.get(architecture)
    lora = SimpleNamespace(enable_tower_connector_lora=True)
    manager = make_manager(base, lora_config=lora)
    assert_left_to_vllm(manager, "LoRA", "enable_tower_connector_lora")
    assert manager.execute(ordinary_images(base)) is None


def test_lora_on_the_language_model_alone_changes_nothing(
    small_encoders: SmallEncoders,
) -> None:
    base = small_encoders.get("Gemma3ForConditionalGeneration")
    lora = SimpleNamespace(enable_tower_connector_lora=False)
    assert make_manager(base, lora_config=lora).active


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp8_attention(architecture: str, small_encoders: SmallEncoders) -> None:
    """It keeps scales that graphs do not advance."""
    base = small_encoders.get(architecture)
    model_config = copy.copy(base.vllm_config.model_config)
    model_config.multimodal_config = copy.copy(model_config.multimodal_config)
    model_config.multimodal_config.mm_encoder_attn_dtype = "fp8"
    manager = make_manager(base, model_config=model_config)
    assert_left_to_vllm(manager, "fp8", "--mm-encoder-attn-dtype")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tower_that_is_not_loaded(
    architecture: str, small_encoders: SmallEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its modalities limited to 0: vLLM puts a placeholder there."""
    base = small_encoders.get(architecture)
    placeholder = type("StageMissingLayer", (torch.nn.Module,), {})()
    name = base.adapter.tower_attribute  # type: ignore[attr-defined]
    monkeypatch.setitem(base.model._modules, name, placeholder)
    assert_left_to_vllm(make_manager(base), "not loaded")


@pytest.mark.parametrize("error", [AttributeError, ValueError])
@pytest.mark.parametrize(
    "method", ["unsupported_reason", "config", "budget_range", "capacity"]
)
def test_a_model_that_its_adapter_does_not_know(
    method: str,
    error: type[Exception],
    small_encoders: SmallEncoders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another vLLM has built it otherwise: said, and left alone."""
    base = small_encoders.get("Qwen2VLForConditionalGeneration")

    def fail(*_: Any) -> None:
        raise error("the tower has no blocks")

    monkeypatch.setattr(type(base.adapter), method, fail)
    assert_left_to_vllm(make_manager(base), "its adapter cannot", "no blocks")


def test_a_model_that_no_longer_can_be_captured(
    small_encoders: SmallEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tower was replaced after the first capture."""
    base = small_encoders.get("Qwen2VLForConditionalGeneration")
    manager = make_manager(base)
    manager.capture()
    assert manager.is_captured()
    manager._drop_stale_graphs("visual.weight")
    refusal = (manager.adapter, "its tower is another")
    monkeypatch.setattr("vllm_encoder_cg.manager.adapt", lambda *_: refusal)
    manager.capture()
    assert not manager.is_captured()
    assert manager.execute(ordinary_images(base)) is None


def with_quantised_input(
    base: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
    key: Any,
    part: str = "visual",
) -> EncoderCudaGraphManager:
    """One linear of a part of the model quantises its input."""
    modules = base.model.get_submodule(part).modules()
    linear = next(m for m in modules if hasattr(m, "quant_method"))
    monkeypatch.setattr(linear, "quant_method", copy.copy(linear.quant_method))
    linear.quant_method.activation_quant_key = key
    return make_manager(base)


def test_linears_that_scale_by_all_rows(
    small_encoders: SmallEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else padding, and what an earlier batch left in it, would reach real rows."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    base = small_encoders.get("Qwen3VLForConditionalGeneration")
    dynamic = quant_utils.kFp8DynamicTensorSym
    manager = with_quantised_input(base, monkeypatch, dynamic)
    assert_left_to_vllm(manager, "largest value of all rows", "per token")


@pytest.mark.parametrize(
    ("architecture", "part", "refused"),
    [
        ("MiniCPMV2_5", "resampler", True),
        ("KimiVLForConditionalGeneration", "multi_modal_projector", True),
        ("Gemma4ForConditionalGeneration", "embed_vision", True),
        ("Qwen3VLForConditionalGeneration", "language_model", False),
    ],
)
def test_linears_beside_the_tower_count_those_of_the_text_do_not(
    architecture: str,
    part: str,
    refused: bool,
    small_encoders: SmallEncoders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    base = small_encoders.get(architecture)
    dynamic = quant_utils.kFp8DynamicTensorSym
    manager = with_quantised_input(base, monkeypatch, dynamic, part)
    assert manager.active != refused
    if refused:
        assert "largest value of all rows" in (manager.inactive_reason or "")


@pytest.mark.parametrize("name", ["kFp8DynamicTokenSym", "kFp8StaticTensorSym"])
def test_other_quantised_linears_are_captured(
    name: str, small_encoders: SmallEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They round their input, so that two runs differ by more."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    base = small_encoders.get("Qwen3VLForConditionalGeneration")
    manager = with_quantised_input(base, monkeypatch, getattr(quant_utils, name))
    assert manager.active
    assert manager.adapter.coarseness() == 2 and base.adapter.coarseness() == 2
    monkeypatch.undo()
    assert base.adapter.coarseness() == 1


SCHEMES = "vllm.model_executor.layers.quantization.compressed_tensors.schemes"


@pytest.mark.parametrize(
    ("name", "key", "refused", "rounded"),
    [
        ("CompressedTensorsW8A16Fp8", "kFp8DynamicTensorSym", False, False),
        ("CompressedTensorsW8A8Fp8", "kFp8DynamicTensorSym", True, True),
        ("CompressedTensorsW8A8Fp8", "kFp8DynamicTokenSym", False, True),
        ("CompressedTensorsW8A8Int8", None, False, True),
        ("CompressedTensorsWNA16", None, False, False),
    ],
)
def test_schemes_of_compressed_tensors(
    name: str, key: str | None, refused: bool, rounded: bool
) -> None:
    """Weights alone may be quantised, whatever the scheme says of its input."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    schemes = importlib.import_module(SCHEMES)
    scheme = object.__new__(getattr(schemes, name))
    if key is not None:
        scheme.activation_quant_key = getattr(quant_utils, key)
    tower = torch.nn.Sequential(torch.nn.Linear(1, 1))
    tower[0].scheme = scheme
    assert (quantization_refusal(tower) is not None) == refused
    assert rounds_input(tower) == rounded


def test_marlin_quantises_weights_alone() -> None:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    kernel = type("MarlinFP8ScaledMMLinearKernel", (), {})()
    method = SimpleNamespace(
        activation_quant_key=quant_utils.kFp8DynamicTensorSym, fp8_linear=kernel
    )
    tower = torch.nn.Sequential(torch.nn.Linear(1, 1))
    tower[0].quant_method = method  # type: ignore[assignment]
    assert quantization_refusal(tower) is None and not rounds_input(tower)
