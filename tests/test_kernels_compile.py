# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for GPUs that vLLM runs on, once, and fits their memory.

Triton's compiler needs no GPU: a driver that only says which one is meant takes the
place of CUDA's, and launches end when they are compiled. In a process of its own,
since other tests have Triton's interpreter.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.support.module_runs import run_with_triton

CAPABILITIES = (80, 90)
"""Of A100, and of H100 and H200."""

SHARED_BYTES = 99 * 1024
"""That a block may take on any GPU from compute capability 8.0 on: on L4, L40S and RTX
cards.  A kernel that takes more fails when it is launched."""


def call_all_kernels(dtype: torch.dtype, sequences: int, rows: int) -> None:
    """Each with the sizes of a released encoder, and tables that begin anywhere, as
    those of graphs do."""
    from vllm_encoder_cg.kernels.activate import activate
    from vllm_encoder_cg.kernels.add_norm import add_norm
    from vllm_encoder_cg.kernels.bicubic_positions import bicubic_positions
    from vllm_encoder_cg.kernels.bilinear_positions import bilinear_positions
    from vllm_encoder_cg.kernels.locate_rows import locate_rows
    from vllm_encoder_cg.kernels.rotary_tables import rotary_tables
    from vllm_encoder_cg.kernels.rotate_heads import rotate_heads
    from vllm_encoder_cg.kernels.short_attention import (
        sequence_bounds,
        short_attention,
    )
    from vllm_encoder_cg.kernels.window_attention import window_attention
    from vllm_encoder_cg.kernels.window_order import window_order

    heads, size, width = 16, 80, 1280
    # Parts of one table, as a graph has them: each begins where the other ends.
    table = torch.full((64,), 2, dtype=torch.int32)
    sides, starts = (
        table[sequences:][:sequences],
        table[3 * sequences :][: sequences + 1],
    )
    grid = (starts, sides, sides, rows, 2)
    bilinear_positions(torch.zeros(48 * 48, width, dtype=dtype), 48, *grid)
    bicubic_positions(torch.zeros(24 * 24, width, dtype=dtype), 24, 24, *grid, True)
    locate_rows(*grid)
    window_order(*grid[:3], rows // 4, 2, 4)
    rotary_tables(torch.zeros(64, size, dtype=dtype), *grid)
    qkv = torch.zeros(rows, 3 * heads * size, dtype=dtype)
    cos = torch.zeros(rows, size // 2, dtype=dtype)
    short_attention(qkv, cos, cos, heads, sequence_bounds(starts, rows), 0.1)
    window_attention(qkv, cos, cos, heads, starts, 0.1)
    for interleaved in (False, True):
        rotate_heads(qkv, cos, cos, heads, starts[-1:], interleaved=interleaved)
    x = torch.zeros(rows, width, dtype=dtype)
    weight = torch.zeros(width, dtype=dtype)
    for centred in (True, False):
        add_norm(x, x, weight, weight if centred else None, 1e-6, centred=centred)
    activate(x, "gelu_tanh")
    activate(x, "silu", gated=True)


def compile_all() -> None:
    """Fails with the name of the kernel that does not compile or fit."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class NamedGpu:
        """What the compiler asks a driver."""

        def __init__(self, capability: int) -> None:
            self.capability = capability

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.capability, 32)

        def get_current_device(self) -> int:
            return self.capability  # compiled kernels are kept by device

        def get_current_stream(self, device: int) -> int:
            return 0

    run = JITFunction.run
    compiled: dict[str, str] = {}

    def compile_only(
        self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        name = self.fn.__name__
        compiled[kernel.hash] = name
        assert kernel.metadata.shared <= SHARED_BYTES, (name, kernel.metadata.shared)
        return kernel

    JITFunction.run = compile_only
    for capability in CAPABILITIES:
        driver.set_active(NamedGpu(capability))
        call_all_kernels(torch.bfloat16, 16, 512)
        once = dict(compiled)
        call_all_kernels(torch.bfloat16, 1, 4)
        call_all_kernels(torch.bfloat16, 5, 148)
        again = [name for key, name in compiled.items() if key not in once]
        assert not again, f"compiled anew for another number of images: {again}"
        call_all_kernels(torch.bfloat16, 5, 1024)
    print(Counter(compiled.values()))


def test_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run_with_triton(
        "tests.test_kernels_compile", environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    )


if __name__ == "__main__":
    compile_all()
