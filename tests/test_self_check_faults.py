# SPDX-License-Identifier: Apache-2.0
"""Faults of a toy encoder that are to be found in the only graph of a path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.toy_adapter import ToyAdapter, ToyModel, make_items
from tests.support.toy_manager import make_toy_manager
from vllm_encoder_cg.adapter import EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.startup.self_check import keys_to_check

PARTS = "parts"


class FillsGraphs(ToyAdapter):
    """Samples of `parts` take a graph wholly."""

    def sample(self, shape: GraphShape, seed: int) -> Any:
        tokens = shape.capacity.tokens
        if shape.key.path != PARTS or tokens < 8:
            return super().sample(shape, seed)
        (width,) = shape.key.axis_keys
        return make_items(*[(tokens // 8, width)] * 8, seed=seed)


class LosesUpperRows(FillsGraphs):
    """A table that is too short."""

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        out = super().forward(buffers, shape).clone()
        out[shape.capacity.tokens * 5 // 8 :] = 0
        return out


class LosesTheLastRow(FillsGraphs):
    """``cu_seqlens`` that end one too early."""

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        out = super().forward(buffers, shape).clone()
        out[-1] = 0
        return out


class EagerGivesMore(ToyAdapter):
    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = "whole"
    ) -> torch.Tensor:
        rows = super().eager(batch, indices, path)
        return torch.cat([rows, torch.ones(3, rows.shape[1])])


class EagerOverwrites(ToyAdapter):
    """The graph reads memory that eager forwards use as well."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self.factor = torch.ones(3)

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        return super().forward(buffers, shape) * self.factor

    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = "whole"
    ) -> torch.Tensor:
        rows = super().eager(batch, indices, path)
        self.factor.fill_(7)
        return rows


def captured(
    monkeypatch: pytest.MonkeyPatch,
    adapter: type[ToyAdapter],
    *budgets: int,
) -> set[GraphKey]:
    """The graphs that the check left."""
    model = ToyModel(widths=(4,))
    manager = make_toy_manager(monkeypatch, model, adapter, budgets=budgets)
    return set(manager._graphs.graphs)


@pytest.mark.parametrize("budget", [8, 8192])
@pytest.mark.parametrize("fault", [LosesUpperRows, LosesTheLastRow])
def test_rows_of_a_full_graph(
    fault: type[ToyAdapter], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In large ones, too."""
    assert any(k.path == PARTS for k in captured(monkeypatch, FillsGraphs, budget))
    assert not any(k.path == PARTS for k in captured(monkeypatch, fault, budget))


@pytest.mark.parametrize("fault", [EagerGivesMore, EagerOverwrites])
def test_what_eager_does(
    fault: type[ToyAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert captured(monkeypatch, ToyAdapter, 8)
    assert not captured(monkeypatch, fault, 8)


@pytest.mark.parametrize("count", [1, 2, 3, 24, 61, 200])
def test_checked_graphs_are_spread_evenly(count: int) -> None:
    """Both ends, at least one between them, and none of more than 32 in a row left
    out."""
    keys = [GraphKey("default", budget) for budget in range(1, count + 1)]
    budgets = [key.token_budget for key in keys_to_check(keys)]
    assert budgets[0] == 1 and budgets[-1] == count
    assert len(budgets) >= min(count, 3) and len(budgets) <= 3 + count // 32
    gaps = [b - a for a, b in pairwise(budgets)]
    assert max(gaps, default=0) <= 32
