# SPDX-License-Identifier: Apache-2.0
"""The recipes of the sample checkpoints, by architecture."""

from __future__ import annotations

from vllm_encoder_cg.samples.architectures import (
    deepseek_ocr,
    ernie,
    gemma3,
    gemma4,
    glm,
    internvl,
    kimi,
    llama4,
    minicpmv,
    qwen2,
    qwen3,
    step3,
)
from vllm_encoder_cg.samples.definition import SampleArchitecture

_MODULES = (
    qwen2,
    qwen3,
    glm,
    ernie,
    kimi,
    internvl,
    gemma3,
    gemma4,
    llama4,
    minicpmv,
    step3,
    deepseek_ocr,
)

ARCHITECTURES: dict[str, SampleArchitecture] = {
    sample.name: sample for module in _MODULES for sample in module.SAMPLES
}
