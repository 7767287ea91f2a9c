# SPDX-License-Identifier: Apache-2.0
"""Towers that vLLM hard-codes at full size, made small for a CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

_WIDTH = 64


@contextmanager
def small_deepseek_ocr(
    *, base_size: int | None = None, image_size: int | None = None
) -> Iterator[None]:
    """DeepSeek-OCR built in here has vLLM's own tower classes, narrow and with 2
    layers each; SAM keeps a windowed and a global layer.

    Args:
        base_size: side of the whole image, as the adapter sees it; None: vLLM's.
        image_size: side of a crop, likewise.
    """
    import torch
    from transformers import CLIPVisionConfig
    from vllm.model_executor.models import deepencoder, deepseek_ocr
    from vllm.transformers_utils.processors import deepseek_ocr as processor

    make_projector = deepseek_ocr.MlpProjector

    def sam() -> Any:
        return deepencoder.ImageEncoderViT(
            embed_dim=_WIDTH,
            depth=2,
            num_heads=2,
            mlp_ratio=2,
            norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
            use_rel_pos=True,
            window_size=14,
            global_attn_indexes=(1,),
            last_conv_output=_WIDTH,
        )

    def clip_config(**released: Any) -> CLIPVisionConfig:
        small = {
            "hidden_size": _WIDTH,
            "intermediate_size": 2 * _WIDTH,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
        }
        return CLIPVisionConfig(**released | small)

    def projector(config: Any) -> Any:
        config = copy.copy(config)
        config.input_dim = 2 * _WIDTH
        return make_projector(config)

    with ExitStack() as stack:
        for module, name, value in [
            (deepseek_ocr, "build_sam_vit_b", sam),
            (deepseek_ocr, "CLIPVisionConfig", clip_config),
            (deepseek_ocr, "MlpProjector", projector),
            (processor, "BASE_SIZE", base_size),
            (processor, "IMAGE_SIZE", image_size),
        ]:
            if value is not None:
                stack.enter_context(mock.patch.object(module, name, value))
        yield
