# SPDX-License-Identifier: Apache-2.0
"""The engine of the demo, in a process of its own: prompts in, records out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_encoder_cg.samples.chat_media import ChatPrompt

if TYPE_CHECKING:
    from vllm_encoder_cg.adapter import EncoderBatch
    from vllm_encoder_cg.manager import EncoderCudaGraphManager
    from vllm_encoder_cg.planning.plans import Plan

ARCHITECTURE = "Qwen3VLForConditionalGeneration"

# On a CPU replaying saves nothing: the demo is about values, and few graphs do.
_CPU_SETTINGS = {"max_graphs": 16}


@dataclass(frozen=True)
class EngineSpec:
    """What to start and what to ask."""

    prompts: tuple[ChatPrompt, ...]
    graphs: bool
    """Whether ``cudagraph_mm_encoder`` is set."""
    model: str | None
    """None: a sample checkpoint with random weights, written to `folder`."""
    folder: Path
    max_tokens: int
    """Tokens to generate per prompt."""
    seed: int


@dataclass
class ItemRecord:
    """How one image or video was encoded."""

    modality: str
    tokens: int
    replay: int | None
    """Number of the replay, from 1; None: eagerly."""
    budget: int | None
    padding: int | None
    """Tokens of the budget that belong to no item of the replay."""
    reason: str | None
    """Why eagerly."""
    error: float | None
    """Relative norm of the difference from eager; None: it is eager."""


@dataclass
class EngineRun:
    """What an engine did."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Generated, by prompt."""
    items: dict[str, list[ItemRecord]] = field(default_factory=dict)
    """By prompt, in the order in which they were encoded."""
    device: str = ""
    dtype: str = ""
    architecture: str = ""
    backend: str = ""
    inactive_reason: str | None = None
    statistics: dict[str, Any] = field(default_factory=dict)


def redirect_output(log: Path | None) -> None:
    """Sends everything that this process prints to a file, if one is given."""
    if log is None:
        return
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def run_engine(spec: EngineSpec) -> EngineRun:
    """Starts an engine and asks it all prompts, one after the other."""
    import vllm_encoder_cg

    # Also where the package is importable but not installed.
    vllm_encoder_cg.register()
    from vllm import LLM, SamplingParams

    from vllm_encoder_cg.samples.engines import forget_media, manager_of

    llm = LLM(**_engine_args(spec))
    sampling = SamplingParams(
        temperature=0, max_tokens=spec.max_tokens, ignore_eos=True
    )
    run = EngineRun()
    recorder = _Recorder()
    manager = manager_of(llm) if spec.graphs else None
    if spec.graphs and (manager is None or not manager.is_captured()):
        run.inactive_reason = (
            getattr(manager, "inactive_reason", None) or "no graph was captured"
        )
        return run
    if manager is not None:
        manager.observer = recorder.attach(manager)
    for prompt in spec.prompts:
        if manager is not None and not _takes(manager, prompt):
            continue
        forget_media(llm)
        recorder.items = []
        output = llm.chat(prompt.messages, sampling, use_tqdm=False)[0]
        run.token_ids[prompt.name] = list(output.outputs[0].token_ids)
        run.items[prompt.name] = recorder.items
    if manager is not None:
        run.device = str(manager.device)
        run.dtype = str(manager.dtype).removeprefix("torch.")
        run.architecture = type(manager.model).__name__
        run.backend = manager.adapter.backend_name()
        run.statistics = manager.get_cumulative_stats()
    return run


def _takes(manager: EncoderCudaGraphManager, prompt: ChatPrompt) -> bool:
    return all(manager.supports_modality(media.modality) for media in prompt.media)


def _engine_args(spec: EngineSpec) -> dict[str, Any]:
    from vllm.platforms import current_platform

    from vllm_encoder_cg.samples.checkpoints import engine_kwargs, write_checkpoint

    on_cpu = current_platform.is_cpu()
    args: dict[str, Any] = {"model": spec.model, "max_model_len": -1}
    if spec.model is None:
        folder = write_checkpoint(
            ARCHITECTURE, spec.folder, vision="small" if on_cpu else "released"
        )
        args = engine_kwargs(ARCHITECTURE) | {"model": str(folder)}
        if on_cpu:
            args |= {"dtype": "float32", "max_num_batched_tokens": 2048}
    args |= {
        "seed": spec.seed,
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": _most_media(spec.prompts),
    }
    if on_cpu:
        args["enforce_eager"] = True
    if spec.graphs:
        args["compilation_config"] = {"cudagraph_mm_encoder": True}
        if on_cpu:
            args["additional_config"] = {"encoder_cg": _CPU_SETTINGS}
    return args


def _most_media(prompts: Sequence[ChatPrompt]) -> dict[str, int]:
    return {
        modality: max(len(prompt.of_modality(modality)) for prompt in prompts)
        for modality in ("image", "video")
    }


class _Recorder:
    """Compares every batch of a manager with the model's own forward."""

    def __init__(self) -> None:
        self.items: list[ItemRecord] = []
        self._replays = 0

    def attach(self, manager: EncoderCudaGraphManager) -> Any:
        """An observer for `manager`."""
        from vllm_encoder_cg.verification import eager_embeddings

        def observe(batch: EncoderBatch, plan: Plan, outputs: Any) -> None:
            errors: list[float | None] = [None] * len(batch.specs)
            if outputs is not None:
                expected = eager_embeddings(manager.model, batch.mm_kwargs)
                errors = _relative_norms(outputs, expected)
            self.items += self._records(batch, plan, errors)

        return observe

    def _records(
        self, batch: EncoderBatch, plan: Plan, errors: list[float | None]
    ) -> list[ItemRecord]:
        records: dict[int, ItemRecord] = {}
        for sub_batch in plan.sub_batches:
            steps = list(sub_batch.steps.values())
            eager = next((step.eager for step in steps if step.eager), None)
            if eager is None:
                self._replays += 1
            budget = sum(step.key.token_budget for step in steps if step.key)
            tokens = sum(step.tokens for step in steps if step.key)
            for index in sub_batch.indices:
                records[index] = ItemRecord(
                    modality=batch.modality,
                    tokens=batch.specs[index].output_tokens,
                    replay=None if eager else self._replays,
                    budget=None if eager else budget,
                    padding=None if eager else budget - tokens,
                    reason=eager.value if eager else None,
                    error=errors[index],
                )
        return [records[index] for index in sorted(records)]


def _relative_norms(outputs: Any, expected: Any) -> list[float | None]:
    from vllm_encoder_cg.startup.rounding import relative_norm

    return [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
