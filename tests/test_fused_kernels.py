# SPDX-License-Identifier: Apache-2.0
"""A whole tower on its kernels equals vLLM's eager forward.

In Triton's interpreter, so in a process of its own, and in float32, where it can be
compared to 1e-4.  What a CPU has no counterpart of stays out: FlashAttention, streams,
and the epilogue of products.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

from tests.support.module_runs import run_with_triton

TOLERANCE = 1e-4
ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
#: Whose patches come from a convolution on a GPU, which lays columns together.
CONVOLVED = ("Gemma3ForConditionalGeneration", "MiniCPMV4_5")
#: Rows up to which attention is one kernel, and what then runs in blocks that attend
#: to whole images.
KERNELS = {0: "rotate_heads", 4096: "short_attention"}


def compare() -> None:
    """On images of unlike sizes that leave padding in the graph."""
    import torch

    from vllm_encoder_cg import kernels
    from vllm_encoder_cg.kernels import (
        rotate_heads,
        short_attention,
        window_attention,
    )
    from vllm_encoder_cg.models.fused import attention, blocks, modules
    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )
    from vllm_encoder_cg.samples.encoder_inputs import image_batch
    from vllm_encoder_cg.startup.rounding import relative_norm

    options = EncoderOptions(
        architecture=ARCHITECTURE,
        budgets=(32,),
        max_tokens=32,
        settings={"cost_model": False, "self_check": False, "fused": "on"},
    )
    called: list[str] = []

    def counted(module: Any, name: str) -> Any:
        kernel = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return kernel(*args, **kwargs)

        return mock.patch.object(module, name, call)

    torch.set_num_threads(1)
    with captured_encoder(options) as manager, ExitStack() as stack:
        mm_kwargs = image_batch(manager.adapter, [(112, 84), (56, 56)], seed=1)
        with torch.inference_mode():
            expected = manager.model.embed_multimodal(**mm_kwargs)
        for patch in (
            mock.patch.object(kernels, "is_available", lambda device: True),
            mock.patch.object(modules, "is_plain", lambda module: False),
            mock.patch.object(blocks, "is_plain", lambda module: True),
            mock.patch.object(attention, "HALVES", (torch.float32,)),
            mock.patch.object(attention, "ROW_OFFSETS", ("TORCH_SDPA",)),
            counted(rotate_heads, "rotate_heads"),
            counted(short_attention, "short_attention"),
            counted(window_attention, "window_attention"),
        ):
            stack.enter_context(patch)
        for short_rows, kernel in KERNELS.items():
            called.clear()
            manager.poison_buffers()
            with mock.patch.object(attention.Attend, "short_rows", short_rows):
                found = manager.execute(mm_kwargs)
            assert found is not None
            for result, reference in zip(found, expected, strict=True):
                assert relative_norm(result, reference) < TOLERANCE
            assert set(called) == {"window_attention", kernel}, called


def compare_one_image(architecture: str) -> None:
    """On the smallest graph, which has one row of patches."""
    import torch

    from vllm_encoder_cg import kernels
    from vllm_encoder_cg.kernels import add_norm
    from vllm_encoder_cg.models.fused import modules
    from vllm_encoder_cg.samples.captured_encoder import (
        EncoderOptions,
        captured_encoder,
    )
    from vllm_encoder_cg.samples.encoder_inputs import image_batch
    from vllm_encoder_cg.startup.rounding import relative_norm

    options = EncoderOptions(
        architecture=architecture,
        settings={
            "cost_model": False,
            "self_check": False,
            "fused": "on",
            "max_graphs": 2,
        },
    )
    torch.set_num_threads(1)
    with captured_encoder(options) as manager:
        mm_kwargs = image_batch(manager.adapter, [(56, 56)], seed=1)
        with torch.inference_mode():
            expected = manager.model.embed_multimodal(**mm_kwargs)
        tower = manager.adapter.tower
        embeddings = getattr(tower, "vision_model", tower).embeddings
        embeddings.register_forward_hook(
            lambda module, inputs, output: output.mT.contiguous().mT
        )
        with (
            mock.patch.object(kernels, "is_available", lambda device: True),
            mock.patch.object(modules, "is_plain", lambda module: False),
            mock.patch.object(add_norm, "add_norm", wraps=add_norm.add_norm) as norm,
        ):
            found = manager.execute(mm_kwargs)
        assert found is not None and norm.called
        assert relative_norm(found[0], expected[0]) < TOLERANCE


def test_tower_on_kernels_equals_eager() -> None:
    run_with_triton("tests.test_fused_kernels", os.environ | {"TRITON_INTERPRET": "1"})


if __name__ == "__main__":
    compare()
    for architecture in CONVOLVED:
        compare_one_image(architecture)
