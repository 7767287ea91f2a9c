# SPDX-License-Identifier: Apache-2.0
"""A manager of the toy encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.toy_adapter import ToyAdapter, ToyModel, make_toy_config
from vllm_encoder_cg.manager import EncoderCudaGraphManager


def make_toy_manager(
    monkeypatch: pytest.MonkeyPatch,
    model: ToyModel | None = None,
    adapter: type[ToyAdapter] = ToyAdapter,
    *,
    budgets: tuple[int, ...] = (2, 4, 8),
    cudagraph_metrics: bool = False,
    **settings: Any,
) -> EncoderCudaGraphManager:
    """One on a CPU that has captured.

    Args:
        settings: options of ``additional_config.encoder_cg``.
    """
    config = make_toy_config(encoder_cudagraph_token_budgets=list(budgets))
    config.additional_config["encoder_cg"].update(settings)
    config.observability_config.cudagraph_metrics = cudagraph_metrics
    monkeypatch.setattr(
        "vllm_encoder_cg.manager.adapt",
        lambda model, vllm_config: (adapter(model, vllm_config), None),
    )
    manager = EncoderCudaGraphManager(
        config, torch.device("cpu"), torch.float32, model or ToyModel()
    )
    manager.capture()
    return manager
