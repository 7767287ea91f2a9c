# SPDX-License-Identifier: Apache-2.0
"""Which adapter serves which vLLM model class."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_encoder_cg.protocol import SupportsEncoderCudaGraph

if TYPE_CHECKING:
    from vllm_encoder_cg.adapter import EncoderAdapter

_ADAPTERS: dict[str, str] = {
    "DeepseekOCRForCausalLM": "deepseek_ocr:DeepseekOCRAdapter",
    "Ernie4_5_VLMoeForConditionalGeneration": "ernie4_5_vl:Ernie45VLAdapter",
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3Adapter",
    "Gemma4ForConditionalGeneration": "gemma4:Gemma4Adapter",
    "Glm4vForConditionalGeneration": "glm4v:Glm4vAdapter",
    "InternVLChatModel": "internvl:InternVLAdapter",
    "KimiVLForConditionalGeneration": "kimi_vl:KimiVLAdapter",
    "Llama4ForConditionalGeneration": "llama4:Llama4Adapter",
    "MiniCPMV2_5": "minicpmv:MiniCPMVAdapter",
    "MiniCPMV2_6": "minicpmv:MiniCPMVAdapter",
    "MiniCPMV4_0": "minicpmv:MiniCPMVAdapter",
    "MiniCPMV4_5": "minicpmv:MiniCPMVAdapter",
    "Qwen2VLForConditionalGeneration": "qwen2_vl:Qwen2VLAdapter",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl:Qwen25VLAdapter",
    "Qwen3VLForConditionalGeneration": "qwen3_vl:Qwen3VLAdapter",
    "Qwen3_5ForConditionalGeneration": "qwen3_vl:Qwen3VLAdapter",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_vl:Qwen3VLAdapter",
    "Step3VLForConditionalGeneration": "step3_vl:Step3VLAdapter",
}
"""Exact class name -> ``module:class`` in this package.  Subclasses of these
models have towers, tile sizes or output layouts of their own, so they do not
match."""

_POOLING_MODELS = "vllm.model_executor.models.adapters"
"""Where vLLM derives pooling models from others."""


def adapted_architectures() -> tuple[str, ...]:
    """Class names of all models that have an adapter."""
    return tuple(_ADAPTERS)


def has_fused_forward(architecture: str) -> bool:
    """Whether there is a forward in fewer kernels for a model that has an adapter,
    told without importing either."""
    module = _ADAPTERS[architecture].partition(":")[0]
    return (Path(__file__).parent / "fused" / f"{module}.py").is_file()


def load_adapter(architecture: str) -> type[EncoderAdapter]:
    """The adapter class for a model class name.

    Raises:
        KeyError: there is none.
    """
    module, _, name = _ADAPTERS[architecture].partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def find_adapter(model: Any) -> type[EncoderAdapter] | None:
    """The adapter class for a loaded vLLM model, by its exact class or the one
    that vLLM made a pooling model of; None if there is none, as for a class of that
    name from elsewhere."""
    cls = model if isinstance(model, type) else type(model)
    # To embed or classify, vLLM derives from the class, which keeps its encoder.
    cls = next(base for base in cls.__mro__ if base.__module__ != _POOLING_MODELS)
    if cls.__name__ not in _ADAPTERS or not cls.__module__.startswith("vllm."):
        return None
    return load_adapter(cls.__name__)


def adapt(model: Any, vllm_config: Any) -> tuple[EncoderAdapter, str | None]:
    """An adapter around a loaded model, and why it cannot be captured, if so.

    A model with an adapter here is driven by it; any other one that implements
    vLLM's protocol, by that protocol.
    """
    cls = find_adapter(model)
    if cls is None:
        from vllm_encoder_cg.native_adapter import NativeProtocolAdapter

        native = NativeProtocolAdapter(model, vllm_config)
        if not isinstance(model, SupportsEncoderCudaGraph):
            return (
                native,
                "there is no adapter for it, and it has no support of its own",
            )
        return native, native.unsupported_reason()
    adapter = cls(model, vllm_config)
    try:
        return adapter, adapter.unsupported_reason()
    except Exception as error:
        # The model is not what the adapter knows: another vLLM, another tower.
        return adapter, f"its adapter cannot read it: {type(error).__name__}: {error}"
