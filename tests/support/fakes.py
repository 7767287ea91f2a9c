# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what vLLM hands to the integration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode


class FakeManager:
    """Takes what vLLM passes to a manager and remembers how it was used."""

    def __init__(self, vllm_config: Any, device: Any, dtype: Any, model: Any) -> None:
        self.model = model
        self.token_budgets = [64, 128]
        self.active = True
        self.inactive_reason: str | None = None
        self.outputs: Any = None
        self.calls: list[str] = []
        self._captured = False

    def capture(self, graph_pool: Any) -> None:
        self.calls.append("capture")
        self._captured = True

    def execute(self, mm_kwargs: dict[str, Any]) -> Any:
        self.calls.append("execute")
        return self.outputs

    def supports_modality(self, modality: str) -> bool:
        return modality == "image"

    def is_captured(self) -> bool:
        return self._captured

    def clear(self) -> None:
        self._captured = False

    def get_num_graphs_to_capture(self) -> int:
        return len(self.token_budgets)

    def describe_graphs(self) -> str:
        return f"{len(self.token_budgets)} graphs for 64 to 128 tokens"

    def get_cumulative_stats(self) -> dict[str, Any]:
        return {"num_budgets": len(self.token_budgets) if self._captured else 0}

    def log_final_stats(self) -> None:
        self.calls.append("log_final_stats")


class ModelWithAdapter:
    """A model that vLLM does not support and an adapter does."""


class ModelWithout:
    """A model that nobody supports."""


def make_v1_runner(model: Any, manager: FakeManager | None = None) -> SimpleNamespace:
    """As V1's: `manager` appears when the runner is told to create it."""
    runner = SimpleNamespace(
        model=model, supports_mm_inputs=True, encoder_cudagraph_manager=None
    )

    def create_manager() -> None:
        runner.encoder_cudagraph_manager = manager

    runner._maybe_init_encoder_cudagraph_manager = create_manager
    return runner


def make_v2_runner(model: Any, manager: FakeManager | None = None) -> SimpleNamespace:
    """As V2's: the manager was created together with the model's state."""
    return SimpleNamespace(
        model=model,
        supports_mm_inputs=True,
        model_state=SimpleNamespace(
            supports_mm_inputs=True,
            encoder_runner=SimpleNamespace(cudagraph_manager=manager),
        ),
    )


def make_worker(
    runner: SimpleNamespace,
    *,
    cudagraph_mm_encoder: bool = True,
    enforce_eager: bool = False,
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL,
) -> SimpleNamespace:
    """A worker with as much as the integration looks at."""
    return SimpleNamespace(
        model_runner=runner,
        model_config=SimpleNamespace(enforce_eager=enforce_eager),
        compilation_config=SimpleNamespace(
            cudagraph_mm_encoder=cudagraph_mm_encoder, cudagraph_mode=cudagraph_mode
        ),
        get_model=lambda: runner.model,
    )
