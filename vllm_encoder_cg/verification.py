# SPDX-License-Identifier: Apache-2.0
"""Compares a captured manager with the model's own ``embed_multimodal``.

The command ``verify`` and the tests of every adapter run the same cases
(``verification_cases.py``) through this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vllm_encoder_cg.samples.encoder_inputs import image_batch, media_batch
from vllm_encoder_cg.startup.rounding import allowed_error, nudge, relative_norm
from vllm_encoder_cg.verification_cases import (
    FULL_SIDE,
    Case,
    MediaBatch,
    default_cases,
    images,
)

if TYPE_CHECKING:
    from vllm_encoder_cg.manager import EncoderCudaGraphManager
    from vllm_encoder_cg.planning.plans import Plan

VERIFY_TOLERANCE: dict[torch.dtype, float] = {
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
}
"""Largest relative norm of the difference from eager, per item; of towers whose linears
quantise their input, twice as much.  What keeps a graph from serving is
``startup.self_check.SELF_CHECK_TOLERANCE``."""


def verify_tolerance(manager: EncoderCudaGraphManager) -> float:
    """``VERIFY_TOLERANCE``, as the manager's encoder has it."""
    return VERIFY_TOLERANCE[manager.dtype] * manager.adapter.coarseness()


@dataclass
class CaseResult:
    """What a case came to, over all its calls."""

    case: str
    items: str
    calls: int = 0
    hits: int = 0
    """Items wholly encoded by graph."""
    eager: int = 0
    """Items of which a path, or everything, was encoded eagerly."""
    eager_reasons: list[str] = field(default_factory=list)
    tokens: int = 0
    replayed_tokens: int = 0
    """Tokens of items that went through graphs, all paths together."""
    computed_tokens: int = 0
    """What those graphs computed: their budgets, or more where they are of whole rows
    or tiles."""
    budgets: list[int] = field(default_factory=list)
    """Budgets replayed, in order."""
    error: float = 0.0
    """Largest relative norm of the difference, per item."""
    allowed_error: float = 0.0
    """What rounding explains: the tolerance, or more where eager is further than
    that from itself (``rounding.py``; measured only where an item exceeds it)."""
    bitwise: bool = True
    """Whether every value equals eager's."""
    problems: list[str] = field(default_factory=list)
    """What is wrong; empty: the case is passed."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def padding(self) -> float:
        """Share of the replayed tokens that belong to no item."""
        total = self.computed_tokens
        return 1 - self.replayed_tokens / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self) | {"ok": self.ok, "padding": self.padding}


class Verifier:
    """Runs cases through a manager and through the model.

    Args:
        manager: captured; its observer is used.
        tolerance: largest relative norm per item; None: ``VERIFY_TOLERANCE`` of the
            manager's dtype.

    Raises:
        ValueError: the manager has no graphs; the message says why.
    """

    def __init__(
        self,
        manager: EncoderCudaGraphManager,
        *,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> None:
        if not manager.is_captured():
            raise ValueError(
                f"no encoder graphs of {type(manager.model).__name__} to verify: "
                f"{manager.inactive_reason or 'none could be captured'}"
            )
        self.manager = manager
        self.tolerance = verify_tolerance(manager) if tolerance is None else tolerance
        self._seed = seed
        self._calls = 0
        self._plans: list[Plan] = []
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        # A few batches, of which one may take as long as all others.
        manager.time_every_batch()
        manager.observer = lambda batch, plan, outputs: self._plans.append(plan)

    def make_inputs(self, batch: MediaBatch) -> dict[str, Any]:
        """Random inputs for a batch, other ones at every call."""
        self._calls += 1
        return media_batch(self.manager.adapter, batch, self._seed + self._calls)

    def run(self, case: Case) -> CaseResult:
        """One case."""
        result = CaseResult(case.name, case.describe())
        for batch in case.batches:
            mm_kwargs = self.make_inputs(batch)
            reference = eager_embeddings(self.manager.model, mm_kwargs)
            for _ in range(case.repeat):
                if case.poison:
                    self.manager.poison_buffers()
                self._compare(mm_kwargs, reference, result)
        return result

    def _compare(
        self,
        mm_kwargs: dict[str, Any],
        reference: Sequence[torch.Tensor],
        result: CaseResult,
    ) -> None:
        self._plans.clear()
        outputs = self.manager.execute(mm_kwargs)
        result.calls += 1
        result.tokens += sum(len(embedding) for embedding in reference)
        if not self._plans:
            result.problems.append("the batch was not planned")
            return
        self._count(self._plans[-1], result)
        self._check_earlier(result)
        if outputs is None:
            return
        self._earlier = [(output, output.clone()) for output in outputs]
        if len(outputs) != len(reference):
            result.problems.append(
                f"{len(outputs)} embeddings instead of {len(reference)}"
            )
            return
        errors = [relative_norm(a, b) for a, b in zip(outputs, reference, strict=True)]
        result.error = max(result.error, *errors)
        result.bitwise &= all(map(torch.equal, outputs, reference))
        worst = max(range(len(errors)), key=errors.__getitem__)
        allowed = self.tolerance
        if not errors[worst] <= allowed:
            nudged = nudge(mm_kwargs, self.manager.dtype)
            moved = eager_embeddings(self.manager.model, nudged)
            allowed = allowed_error(self.tolerance, moved, reference)
        result.allowed_error = max(result.allowed_error, allowed)
        if not errors[worst] <= allowed:
            result.problems.append(
                f"item {worst} of call {result.calls} differs by {errors[worst]:.2e}; "
                f"rounding explains {allowed:.2e}"
            )

    def _count(self, plan: Plan, result: CaseResult) -> None:
        for sub_batch in plan.sub_batches:
            eager = None
            for step in sub_batch.steps.values():
                if step.key is None:
                    eager = step.eager
                else:
                    result.budgets.append(step.key.token_budget)
                    result.computed_tokens += self.manager.computed_tokens(step.key)
                    result.replayed_tokens += step.tokens
            if eager is None:
                result.hits += len(sub_batch.indices)
                continue
            result.eager += len(sub_batch.indices)
            if eager.value not in result.eager_reasons:
                result.eager_reasons.append(eager.value)

    def _check_earlier(self, result: CaseResult) -> None:
        """The outputs of the call before must be what they were."""
        for output, copy in self._earlier:
            if not torch.equal(output, copy):
                result.problems.append("changed the outputs of an earlier call")
                return


def eager_embeddings(model: Any, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What the model itself makes of a batch: one tensor per item."""
    with torch.inference_mode():
        return list(model.embed_multimodal(**mm_kwargs))


def oversize_case(
    manager: EncoderCudaGraphManager, *, start: int = FULL_SIDE
) -> Case | None:
    """An image above every budget, alone and among small ones.

    None where no image of up to eight times `start` is: a tiled encoder has a
    largest number of tokens per image.
    """
    largest = manager.largest_budget()
    side = start
    while side <= 8 * start:
        batch = manager.adapter.parse(image_batch(manager.adapter, [(side, side)], 0))
        if batch is not None and batch.specs[0].output_tokens > largest:
            small = (start // 4, start // 4)
            calls = images((side, side)), images(small, (side, side), small)
            return Case("above every budget", calls)
        side += side // 4
    return None


def standard_cases(
    manager: EncoderCudaGraphManager,
    *,
    largest_side: int = FULL_SIDE,
    random_batches: int = 100,
    seed: int = 0,
) -> list[Case]:
    """``default_cases`` for the limits of a manager, and the oversize case."""
    cases = default_cases(
        manager.config.modalities,
        manager.budgets.limits.max_items,
        largest_side=largest_side,
        random_batches=random_batches,
        seed=seed,
    )
    oversize = oversize_case(manager, start=largest_side)
    return [*cases, *([oversize] if oversize else [])]
