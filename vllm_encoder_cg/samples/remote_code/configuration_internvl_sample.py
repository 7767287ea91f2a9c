# SPDX-License-Identifier: Apache-2.0
"""Configuration of a sample InternVL checkpoint (copied into its folder)."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, Qwen2Config


class SampleInternVisionConfig(PretrainedConfig):
    """The tower; every entry of ``config.json`` becomes an attribute."""

    model_type = "intern_vit_6b"
    base_config_key = "vision_config"


class SampleInternVLConfig(PretrainedConfig):
    """A tower and a Qwen2 text model."""

    model_type = "internvl_chat"
    sub_configs = {  # noqa: RUF012
        "vision_config": SampleInternVisionConfig,
        "text_config": Qwen2Config,
    }

    def __init__(
        self, vision_config: Any = None, text_config: Any = None, **kwargs: Any
    ) -> None:
        if not isinstance(vision_config, PretrainedConfig):
            vision_config = SampleInternVisionConfig(**(vision_config or {}))
        if not isinstance(text_config, PretrainedConfig):
            text_config = Qwen2Config(**(text_config or {}))
        self.vision_config = vision_config
        self.text_config = text_config
        super().__init__(**kwargs)
