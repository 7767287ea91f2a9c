# SPDX-License-Identifier: Apache-2.0
"""The table of supported models is what the adapters support."""

from __future__ import annotations

import pytest

from vllm_encoder_cg.models.catalog import ADAPTED, SupportedModel, native_models
from vllm_encoder_cg.models.padded_tower import PaddedTowerAdapter
from vllm_encoder_cg.models.registry import (
    adapted_architectures,
    find_adapter,
    load_adapter,
)
from vllm_encoder_cg.models.two_path_tower import TwoPathAdapter
from vllm_encoder_cg.samples.checkpoints import ARCHITECTURES


def test_every_adapter_is_listed_once_in_order() -> None:
    names = [model.architecture for model in ADAPTED]
    assert sorted(names) == sorted(adapted_architectures())
    assert names == sorted(names)


@pytest.mark.parametrize("model", ADAPTED, ids=lambda model: model.architecture)
def test_entry(model: SupportedModel) -> None:
    adapter = load_adapter(model.architecture)
    assert model.architecture in adapter.architectures
    assert model.modalities == ARCHITECTURES[model.architecture].modalities
    if issubclass(adapter, PaddedTowerAdapter):
        assert model.axis == adapter.axis_name
    else:
        assert model.axis is None
    two_paths = issubclass(adapter, TwoPathAdapter)
    assert model.paths == (("global", "local") if two_paths else ("default",))


def test_native_models_are_those_of_the_installed_vllm() -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
    from vllm.model_executor.models.lfm2_vl import Lfm2VLForConditionalGeneration

    assert SupportsEncoderCudaGraph in Lfm2VLForConditionalGeneration.__mro__
    native = native_models()
    assert "Lfm2VLForConditionalGeneration" in native
    assert not {model.architecture for model in ADAPTED} & set(native)
    assert not any(name.startswith("_") for name in native)


def test_a_model_that_pools_keeps_its_adapter() -> None:
    """``--runner pooling`` derives a class of another name from the model's; before,
    Llama 4 and others had no graphs then, and Gemma 3 vLLM's protocol."""
    pytest.importorskip("vllm")
    from vllm.model_executor.models import adapters
    from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration

    adapter = load_adapter("Gemma3ForConditionalGeneration")
    assert find_adapter(Gemma3ForConditionalGeneration) is adapter
    for derive in (adapters.as_embedding_model, adapters.as_seq_cls_model):
        derived = derive(Gemma3ForConditionalGeneration)
        assert derived.__name__ not in adapted_architectures()
        assert find_adapter(derived) is adapter
