# SPDX-License-Identifier: Apache-2.0
"""One encoder per adapter, captured for few small budgets, for the tests of faults."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from tests.support.small_towers import small_deepseek_ocr
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.gemma4 import Gemma4Adapter
from vllm_encoder_cg.models.minicpmv import MiniCPMVAdapter
from vllm_encoder_cg.models.registry import adapted_architectures, load_adapter
from vllm_encoder_cg.models.tiled_tower import TiledTowerAdapter
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.samples.encoder_inputs import image_batch, video_batch
from vllm_encoder_cg.verification import eager_embeddings

Inputs = dict[str, Any]

DEEPSEEK = "DeepseekOCRForCausalLM"
STEP3 = "Step3VLForConditionalGeneration"

#: The first architecture of every adapter.
ARCHITECTURES = list(
    {load_adapter(name): name for name in reversed(adapted_architectures())}.values()
)[::-1]
VIDEO_ARCHITECTURES = [
    name
    for name in ARCHITECTURES
    if name
    not in (
        DEEPSEEK,
        STEP3,
        "Gemma3ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "MiniCPMV2_5",
    )
]

_BUDGETS = {STEP3: (338, 507), DEEPSEEK: (144, 216)}
_WIDTHS = {"mm_processor_kwargs": {"max_soft_tokens": 70}}
_PIXELS = ("pixel_values", "images_crop", "patch_pixel_values")


class SmallEncoders:
    """Builds and captures each once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._managers: dict[str, EncoderCudaGraphManager] = {}
        self._expected: dict[str, list[torch.Tensor]] = {}

    def get(self, architecture: str) -> EncoderCudaGraphManager:
        """The captured manager of an architecture."""
        if architecture not in self._managers:
            budgets = _BUDGETS.get(architecture, (64, 256))
            options = EncoderOptions(
                architecture=architecture,
                budgets=budgets,
                max_tokens=budgets[-1],
                settings={"cost_model": False, "on_mismatch": "raise"},
                engine=_WIDTHS if architecture.startswith("Gemma4") else {},
            )
            with small_deepseek_ocr(base_size=512, image_size=320):
                manager = self._stack.enter_context(captured_encoder(options))
            self._managers[architecture] = manager
        return self._managers[architecture]

    def expected(self, architecture: str) -> list[torch.Tensor]:
        """What the model itself makes of ``ordinary_images``."""
        if architecture not in self._expected:
            manager = self.get(architecture)
            inputs = ordinary_images(manager)
            self._expected[architecture] = eager_embeddings(manager.model, inputs)
        return self._expected[architecture]


def ordinary_images(manager: EncoderCudaGraphManager, seed: int = 0) -> Inputs:
    """Three images, of which the second is the largest, that fit one graph."""
    if isinstance(manager.adapter, TiledTowerAdapter):
        side = min(kind.side for kind in manager.adapter.kinds.values())
        sizes = [(side, side), (2 * side, side), (side, side)]
    else:
        sizes = [(64, 64), (128, 96), (64, 96)]
    return image_batch(manager.adapter, sizes, seed)


def ordinary_videos(manager: EncoderCudaGraphManager, seed: int = 0) -> Inputs:
    """Two small videos."""
    return video_batch(manager.adapter, [(2, 64, 64), (4, 64, 96)], seed)


def is_pixels(name: str) -> bool:
    """Whether an input of this name holds pixels."""
    return name.startswith(_PIXELS) and "position" not in name


def with_pixels(inputs: Inputs, change: Any) -> Inputs:
    """The inputs with every tensor of pixels changed."""

    def apply(value: Any) -> Any:
        if isinstance(value, list):
            return [apply(each) for each in value]
        return change(value)

    return {k: apply(v) if is_pixels(k) else v for k, v in inputs.items()}


def spoil_item(
    manager: EncoderCudaGraphManager, inputs: Inputs, item: int, value: float
) -> Inputs:
    """The inputs with all pixels of one item set to `value`; 255 where they are
    bytes."""
    adapter = manager.adapter
    batch = adapter.parse(inputs)
    assert batch is not None
    payload = batch.payload
    spoilt = {
        name: value if isinstance(value, list) else value.clone()
        for name, value in inputs.items()
        if is_pixels(name)
    }
    if isinstance(adapter, MiniCPMVAdapter):
        (name,) = spoilt
        spoilt[name] = [
            [torch.full_like(s, value) for s in slices] if i == item else slices
            for i, slices in enumerate(spoilt[name])
        ]
    elif isinstance(adapter, TiledTowerAdapter):
        for (path, tiles), name in zip(payload.tiles.items(), spoilt, strict=True):
            assert path in adapter.kinds
            spoilt[name][tiles.offsets[item] : tiles.offsets[item + 1]] = value
    else:
        (name,) = spoilt
        offsets = payload.row_offsets
        assert isinstance(adapter, Gemma4Adapter) or hasattr(adapter, "pixel_dtype")
        bad = value if spoilt[name].is_floating_point() else 255
        spoilt[name][offsets[item] : offsets[item + 1]] = bad
    return inputs | spoilt
