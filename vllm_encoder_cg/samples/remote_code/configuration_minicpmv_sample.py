# SPDX-License-Identifier: Apache-2.0
"""Configuration of a sample MiniCPM-V checkpoint (copied into its folder)."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, Qwen3Config, SiglipVisionConfig


class SampleMiniCPMVConfig(Qwen3Config):
    """The text model's entries at the top level, the tower's in a sub-config."""

    model_type = "minicpmv"
    sub_configs = {"vision_config": SiglipVisionConfig}  # noqa: RUF012

    def __init__(self, vision_config: Any = None, **kwargs: Any) -> None:
        if not isinstance(vision_config, PretrainedConfig):
            vision_config = SiglipVisionConfig(**(vision_config or {}))
        self.vision_config = vision_config
        super().__init__(**kwargs)
