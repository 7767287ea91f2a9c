# SPDX-License-Identifier: Apache-2.0
"""The recipes of the sample checkpoints, by architecture."""

from __future__ import annotations

from vllm_encoder_cg.samples.architectures import qwen
from vllm_encoder_cg.samples.definition import SampleArchitecture

ARCHITECTURES: dict[str, SampleArchitecture] = {
    sample.name: sample for module in (qwen,) for sample in module.SAMPLES
}
