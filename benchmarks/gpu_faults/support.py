# SPDX-License-Identifier: Apache-2.0
"""What the checks share: encoders, further managers for them, comparisons."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from vllm_encoder_cg.adapter import EncoderAdapter
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.samples.encoder_inputs import image_batch
from vllm_encoder_cg.startup.rounding import allowed_error, nudge, relative_norm
from vllm_encoder_cg.verification import eager_embeddings, verify_tolerance

QWEN3 = "Qwen3VLForConditionalGeneration"
QWEN2_5 = "Qwen2_5_VLForConditionalGeneration"
GEMMA3 = "Gemma3ForConditionalGeneration"
INTERNVL = "InternVLChatModel"
DEEPSEEK = "DeepseekOCRForCausalLM"

BUDGETS = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Eight, so that there is a third one to fail."""

MIB = 1 << 20


@dataclass
class Context:
    """What a check is given."""

    encoders: Encoders
    figures: dict[str, Any] = field(default_factory=dict)
    """What a check measured, for the report."""


Run = Callable[[Context], None]


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    run: Run
    gpu_only: bool


CHECKS: list[Check] = []


def check(name: str, *, gpu_only: bool = False) -> Callable[[Run], Run]:
    """Adds a function to the checks; it raises where something is wrong."""

    def add(run: Run) -> Run:
        CHECKS.append(Check(name, run, gpu_only))
        return run

    return add


class Encoders:
    """Builds and captures each encoder once."""

    def __init__(self, stack: ExitStack, vision: str) -> None:
        self._stack = stack
        self._vision = vision
        self._managers: dict[tuple[Any, ...], EncoderCudaGraphManager] = {}

    def get(
        self,
        architecture: str = QWEN3,
        *,
        backend: str | None = None,
        vision: str | None = None,
        budgets: tuple[int, ...] = BUDGETS,
        **engine: Any,
    ) -> EncoderCudaGraphManager:
        """The captured manager of an encoder."""
        vision = vision or self._vision
        key = (architecture, backend, vision, budgets, repr(engine))
        if key not in self._managers:
            options = EncoderOptions(
                architecture=architecture,
                vision=vision,  # type: ignore[arg-type]
                backend=backend,
                budgets=budgets,
                max_tokens=max(4096, *budgets) if budgets else 4096,
                settings={"cost_model": False, "max_graphs": 8},
                engine=engine,
            )
            manager = self._stack.enter_context(captured_encoder(options))
            self._managers[key] = manager
        return self._managers[key]


def variant(
    manager: EncoderCudaGraphManager,
    *,
    adapter: type[EncoderAdapter] | None = None,
    budgets: Sequence[int] = BUDGETS,
    **settings: Any,
) -> EncoderCudaGraphManager:
    """Another manager, not yet captured, for the model of `manager`."""
    config = copy.copy(manager.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.encoder_cudagraph_token_budgets = list(budgets)
    config.additional_config = {"encoder_cg": {"cost_model": False} | settings}
    arguments = (config, manager.device, manager.dtype, manager.model)
    if adapter is None:
        return EncoderCudaGraphManager(*arguments)
    with mock.patch(
        "vllm_encoder_cg.manager.adapt", lambda m, c: (adapter(m, c), None)
    ):
        return EncoderCudaGraphManager(*arguments)


def images(
    manager: EncoderCudaGraphManager, *sizes: tuple[int, int], seed: int = 0
) -> dict[str, Any]:
    """Random images of (width, height)."""
    return image_batch(manager.adapter, list(sizes), seed)


def some_sizes(generator: random.Random, most: int = 6) -> list[tuple[int, int]]:
    """One to `most` sizes of up to 640 x 640."""
    return [
        (32 * generator.randint(2, 20), 32 * generator.randint(2, 20))
        for _ in range(generator.randint(1, most))
    ]


def eager(
    manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """vLLM's own embeddings of a batch."""
    return eager_embeddings(manager.model, mm_kwargs)


def assert_close(
    manager: EncoderCudaGraphManager,
    outputs: Sequence[torch.Tensor] | None,
    expected: Sequence[torch.Tensor],
    what: str = "an embedding",
) -> float:
    """The largest error; raises where it is above the tolerance of the dtype, or
    above what the encoder's own unsteadiness explains (``rounding.py``)."""
    assert outputs is not None, f"{what}: the batch was left to the model"
    assert len(outputs) == len(expected), f"{what}: {len(outputs)} items"
    worst = max(map(relative_norm, outputs, expected), default=0.0)
    limit = verify_tolerance(manager)
    if worst > limit:
        limit = _explained(manager, limit)
    assert worst <= limit, f"{what} differs from eager by {worst:.1e}"
    return worst


def _explained(manager: EncoderCudaGraphManager, tolerance: float) -> float:
    """What rounding explains, as an ordinary batch shows."""
    mm_kwargs = images(manager, (320, 160), (224, 256))
    moved = eager(manager, nudge(mm_kwargs, manager.dtype))
    return allowed_error(tolerance, moved, eager(manager, mm_kwargs))


def serve(
    manager: EncoderCudaGraphManager, *, seed: int = 0, batches: int = 3
) -> float:
    """A few ordinary batches, by graph and equal to eager; the largest error."""
    worst = 0.0
    hits = manager.stats.hits
    for number in range(batches):
        sizes = [(96 + 32 * number, 160), (224, 64)]
        mm_kwargs = images(manager, *sizes, seed=seed + number)
        outputs = manager.execute(mm_kwargs)
        worst = max(worst, assert_close(manager, outputs, eager(manager, mm_kwargs)))
    assert manager.stats.hits > hits, "nothing went through a graph"
    return worst


def graphs(manager: EncoderCudaGraphManager) -> int:
    """How many there are."""
    return len(manager._graphs.graphs)


def settle() -> None:
    """Gives back what nobody uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def used_memory() -> int:
    """Bytes that PyTorch has taken in this process, its cache not included: what
    others take on the device meanwhile is no leak."""
    settle()
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def capturing() -> bool:
    """Whether the current stream records."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
