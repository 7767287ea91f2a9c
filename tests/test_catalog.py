# SPDX-License-Identifier: Apache-2.0
"""The table of supported models is what the adapters support."""

from __future__ import annotations

import pytest

from vllm_encoder_cg.models.catalog import ADAPTED, SupportedModel, native_models
from vllm_encoder_cg.models.padded_tower import PaddedTowerAdapter
from vllm_encoder_cg.models.registry import adapted_architectures, load_adapter
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
