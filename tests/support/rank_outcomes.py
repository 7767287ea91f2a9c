# SPDX-License-Identifier: Apache-2.0
"""How batches go on one rank of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_encoder_cg.planning.planner import Plan
from vllm_encoder_cg.startup.rounding import relative_norm

if TYPE_CHECKING:
    from vllm_encoder_cg.manager import EncoderCudaGraphManager


@dataclass
class Outcome:
    """What became of one batch on one rank."""

    error: float | None
    """Largest relative norm of the difference from the result of a single rank;
    None: ``execute`` left the batch to the model."""
    replayed: int = 0
    """Items that this rank encoded by graph."""
    eager: int = 0
    """Likewise eagerly."""
    model_error: float = 0.0
    """Of what the model itself makes of the batch on these ranks."""


def compare(results: Any, references: Any) -> float:
    return max(relative_norm(a, b) for a, b in zip(results, references, strict=True))


class Rank:
    """One manager of one rank, and how its batches go."""

    def __init__(
        self, manager: EncoderCudaGraphManager, embed: Callable[[dict[str, Any]], Any]
    ) -> None:
        self.manager = manager
        self._embed = embed
        self._plans: list[Plan] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        manager.observer = lambda batch, plan, outputs: self._plans.append(plan)

    def run(self, mm_kwargs: dict[str, Any], references: Any) -> Outcome:
        """Encodes a batch as vLLM's runner does."""
        self._plans.clear()
        self.manager.poison_buffers()
        with torch.inference_mode():
            outputs = self.manager.execute(mm_kwargs)
            of_model = self._embed(mm_kwargs)
        outcome = Outcome(None, model_error=compare(of_model, references))
        if outputs is None:
            return outcome
        self._kept += [(output, output.clone()) for output in outputs]
        outcome.error = compare(outputs, references)
        for sub_batch in self._plans[-1].sub_batches:
            outcome.eager += len(sub_batch.eager_reasons)
            outcome.replayed += len(sub_batch.indices) - len(sub_batch.eager_reasons)
        return outcome

    def kept_outputs_changed(self) -> bool:
        """Whether a later batch changed what an earlier one returned."""
        return not all(torch.equal(output, copy) for output, copy in self._kept)
