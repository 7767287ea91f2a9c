# SPDX-License-Identifier: Apache-2.0
"""Graphs of several paths keep within ``memory_limit_gib``, whatever they share.

As on a GPU on which a graph takes 1 MiB per token, and graphs of one path use the
memory of each other, but not of another path's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.toy_adapter import ToyModel, encode_eagerly, make_items
from tests.support.toy_manager import make_toy_manager
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.startup.memory_limit import MemoryLimit
from vllm_encoder_cg.startup.memory_meter import MemoryMeter

MIB = 1 << 20
ONE_WIDTH = ToyModel(widths=(8,))
BUDGETS = (2, 4, 8, 16)


def largest_by_path(graphs: GraphSet) -> dict[str, int]:
    largest: dict[str, int] = {}
    for key in graphs.graphs:
        largest[key.path] = max(key.token_budget, largest.get(key.path, 0))
    return largest


def capture_within(
    monkeypatch: pytest.MonkeyPatch, limit_mib: int, taken: Callable[[GraphSet], int]
) -> tuple[EncoderCudaGraphManager, int]:
    """A manager, and how often capturing began."""
    begun: list[GraphSet] = []
    empty = GraphSet.empty

    def begin(device: torch.device) -> GraphSet:
        begun.append(empty(device))
        return begun[-1]

    monkeypatch.setattr("vllm_encoder_cg.graph_set.GraphSet.empty", begin)
    monkeypatch.setattr(
        "vllm_encoder_cg.startup.capture.peak_bytes",
        lambda call, _: ((rows := call()), len(rows) * MIB),
    )
    monkeypatch.setattr(MemoryMeter, "taken_bytes", lambda _: taken(begun[-1]))
    manager = make_toy_manager(
        monkeypatch, ONE_WIDTH, budgets=BUDGETS, memory_limit_gib=limit_mib / 1024
    )
    attempts = [graphs for graphs in begun if graphs.shapes]
    return manager, len(attempts)


def test_a_path_that_shares_less_than_expected_gets_smaller_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, attempts = capture_within(
        monkeypatch, 21, lambda graphs: sum(largest_by_path(graphs).values()) * MIB
    )
    assert largest_by_path(manager._graphs) == {"whole": 16, "parts": 4}
    assert manager.stats.graph_memory_bytes == 20 * MIB
    assert manager.get_cumulative_stats()["dropped_graphs"] == []
    assert attempts == 3  # with 16, 8 and 4 tokens of parts
    mm_kwargs = make_items((3, 8), (0, 8))
    outputs = manager.execute(mm_kwargs)
    assert outputs is not None and manager.stats.hits == 2
    torch.testing.assert_close(outputs, encode_eagerly(mm_kwargs))


def test_what_no_smaller_graph_gives_back_ends_no_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the first path's graphs take as much as there may be."""
    manager, attempts = capture_within(
        monkeypatch, 21, lambda graphs: (20 if len(graphs.graphs) == 1 else 22) * MIB
    )
    assert set(largest_by_path(manager._graphs)) == {"whole", "parts"}
    assert attempts == 4
    assert manager.execute(make_items((1, 8))) is not None


@pytest.mark.parametrize(("taken", "said"), [(1.0, False), (1.02, False), (1.1, True)])
def test_more_than_the_limit_is_said(
    taken: float, said: bool, package_log: pytest.LogCaptureFixture
) -> None:
    limit = MemoryLimit(100 * MIB)
    limit.report(int(taken * 100 * MIB))
    assert ("memory_limit_gib of 0.10" in package_log.text) == said
