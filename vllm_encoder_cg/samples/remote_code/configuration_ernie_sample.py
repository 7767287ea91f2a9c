# SPDX-License-Identifier: Apache-2.0
"""Configuration of a sample ERNIE-4.5-VL checkpoint (copied into its folder).

transformers has another layout under another ``model_type``; vLLM reads the flat
one of the released checkpoint, which brings its own code.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class SampleErnieVisionConfig(PretrainedConfig):
    """The tower; every entry of ``config.json`` becomes an attribute."""

    model_type = "ernie4_5_moe_vl_vision"
    base_config_key = "vision_config"


class SampleErnieConfig(PretrainedConfig):
    """The text model's entries at the top level, the tower's in a sub-config."""

    model_type = "ernie4_5_moe_vl"
    sub_configs = {"vision_config": SampleErnieVisionConfig}  # noqa: RUF012

    def __init__(self, vision_config: Any = None, **kwargs: Any) -> None:
        if not isinstance(vision_config, PretrainedConfig):
            vision_config = SampleErnieVisionConfig(**(vision_config or {}))
        self.vision_config = vision_config
        super().__init__(**kwargs)
