# SPDX-License-Identifier: Apache-2.0
"""What is supported, to be read without building a model.

A test holds the table to what the adapters say of themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_PROTOCOL = "SupportsEncoderCudaGraph"
_BOTH = ("image", "video")
_TWO_PATHS = ("global", "local")
_VARLEN = ("FLASH_ATTN", "TRITON_ATTN")
_VARLEN_CUDNN = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")


@dataclass(frozen=True)
class SupportedModel:
    """One model class of vLLM."""

    architecture: str
    modalities: tuple[str, ...]
    """Encoded by graph."""
    paths: tuple[str, ...] = ("default",)
    """Sub-forwards with graphs of their own."""
    axis: str | None = None
    """What has graphs of its own per value, beside the token budget."""
    backends: tuple[str, ...] = ()
    """Attention backends that can be captured on a GPU; empty: whichever vLLM has
    for the tower, whose attention takes no table of sequences."""


ADAPTED = (
    SupportedModel("DeepseekOCRForCausalLM", ("image",), _TWO_PATHS),
    SupportedModel("Ernie4_5_VLMoeForConditionalGeneration", _BOTH, backends=_VARLEN),
    SupportedModel("Gemma3ForConditionalGeneration", ("image",)),
    SupportedModel(
        "Gemma4ForConditionalGeneration",
        _BOTH,
        axis="soft tokens per image or frame",
    ),
    SupportedModel("Glm4vForConditionalGeneration", _BOTH, backends=_VARLEN),
    SupportedModel("InternVLChatModel", _BOTH),
    SupportedModel("KimiVLForConditionalGeneration", ("image",), backends=_VARLEN),
    SupportedModel("Llama4ForConditionalGeneration", ("image",)),
    *(
        SupportedModel(name, modalities, axis="patches per slice or frame, at most")
        for name, modalities in {
            "MiniCPMV2_5": ("image",),
            "MiniCPMV2_6": _BOTH,
            "MiniCPMV4_0": _BOTH,
            "MiniCPMV4_5": _BOTH,
        }.items()
    ),
    SupportedModel("Qwen2VLForConditionalGeneration", _BOTH, backends=_VARLEN),
    SupportedModel("Qwen2_5_VLForConditionalGeneration", _BOTH, backends=_VARLEN_CUDNN),
    SupportedModel("Qwen3VLForConditionalGeneration", _BOTH, backends=_VARLEN_CUDNN),
    SupportedModel("Qwen3_5ForConditionalGeneration", _BOTH, backends=_VARLEN_CUDNN),
    SupportedModel("Qwen3_5MoeForConditionalGeneration", _BOTH, backends=_VARLEN_CUDNN),
    SupportedModel("Step3VLForConditionalGeneration", ("image",), _TWO_PATHS),
)
"""Models with an adapter here, by name."""


def native_models() -> list[str]:
    """Model classes of the installed vLLM that implement its protocol themselves
    and have no adapter here; empty where vLLM is not installed.

    Read from the source, since importing every model takes minutes.
    """
    spec = find_spec("vllm")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    found = {
        name
        for root in roots
        for file in Path(root, "model_executor", "models").glob("*.py")
        for name in _classes_with_the_protocol(file.read_text())
    }
    return sorted(found - {model.architecture for model in ADAPTED})


def _classes_with_the_protocol(source: str) -> Iterator[str]:
    if f"{_PROTOCOL},\n" not in source and f"{_PROTOCOL})" not in source:
        return
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        if any(isinstance(b, ast.Name) and b.id == _PROTOCOL for b in node.bases):
            yield node.name
