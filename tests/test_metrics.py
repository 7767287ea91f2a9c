# SPDX-License-Identifier: Apache-2.0
"""Counts: every item once, every token where it belongs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planning import Case, cases, graphs, item
from tests.support.toy_adapter import ToyAdapter, ToyModel, encode_eagerly, make_items
from tests.support.toy_manager import make_toy_manager
from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.buffers import BufferArena
from vllm_encoder_cg.definitions import EagerReason, GraphCapacity, GraphKey
from vllm_encoder_cg.observability.metrics import EncoderStats
from vllm_encoder_cg.observability.metrics_table import (
    COLUMNS,
    MAX_ROWS,
    EncoderCudaGraphTable,
)
from vllm_encoder_cg.planning.planner import Planner
from vllm_encoder_cg.planning.plans import Plan, without_graphs


def shapes_of(
    capacities: dict[GraphKey, GraphCapacity],
) -> dict[GraphKey, GraphShape]:
    return {key: GraphShape(key, c) for key, c in capacities.items()}


def plan(case: Case) -> Plan:
    return Planner(case.capacities, case.paths, case.dropped).plan(case.specs)


# -- Any batch ------------------------------------------------------------------


@given(st.lists(cases(), max_size=4))
def test_each_item_is_one_hit_or_one_miss(batches: list[Case]) -> None:
    stats = EncoderStats()
    for case in batches:
        stats.count_plan(plan(case), shapes_of(case.capacities))
    assert stats.items == sum(len(case.specs) for case in batches)
    assert stats.batches == len(batches)
    values = stats.as_dict()
    assert values["graph_hits"] + values["graph_misses"] == values["items"]
    assert sum(values["misses_by_reason"].values()) == values["graph_misses"]
    assert set(values["misses_by_reason"]) == {reason.value for reason in EagerReason}
    replays = Counter(values["replays_by_graph"]).total()
    by_budget = values["replays_by_budget"]
    assert replays == sum(sum(of_path.values()) for of_path in by_budget.values())


@given(cases())
def test_tokens_of_replays_add_up_to_their_capacities(case: Case) -> None:
    stats = EncoderStats()
    stats.count_plan(plan(case), shapes_of(case.capacities))
    computed = sum(
        count * case.capacities[key].tokens for key, count in stats.replays.items()
    )
    assert stats.real_tokens + stats.padded_tokens == computed
    assert stats.padded_tokens >= 0
    assert 0 <= stats.as_dict()["padding_rate"] <= 1


@given(cases())
def test_a_plan_whose_graphs_are_gone_has_no_hit(case: Case) -> None:
    sub_batches = [
        without_graphs(each, case.specs, EagerReason.DROPPED_GRAPH)
        for each in plan(case).sub_batches
    ]
    stats = EncoderStats()
    stats.count_plan(Plan(tuple(sub_batches)), {})
    with_tokens = [
        spec
        for spec in case.specs
        if any(spec.get_path_output_tokens(path) for path in case.paths)
    ]
    assert stats.misses.total() == len(with_tokens)
    assert not stats.replays
    assert stats.real_tokens == stats.padded_tokens == 0


@given(cases())
def test_a_plan_whose_graphs_are_there_stays(case: Case) -> None:
    for each in plan(case).sub_batches:
        kept = without_graphs(
            each, case.specs, EagerReason.DROPPED_GRAPH, case.capacities
        )
        assert kept is each


def test_an_eager_path_keeps_its_reason_where_the_other_loses_its_graph() -> None:
    capacities = graphs(8, path="global")
    specs = [item({"global": 4, "local": 99})]
    (sub_batch,) = Planner(capacities, ("global", "local")).plan(specs).sub_batches
    assert sub_batch.steps["global"].key is not None
    changed = without_graphs(sub_batch, specs, EagerReason.DROPPED_GRAPH)
    assert changed.steps["global"].eager is EagerReason.DROPPED_GRAPH
    assert changed.steps["local"].eager is EagerReason.ABOVE_EVERY_BUDGET
    assert changed.eager_reasons == {0: EagerReason.ABOVE_EVERY_BUDGET}


# -- A manager ------------------------------------------------------------------


def test_padding_is_what_a_replay_computes_beyond_its_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Budgets 4 and 8 of a tower that works in tiles of 6 tokens compute 6 and 12."""
    manager = make_toy_manager(monkeypatch, ToyModel(granularity=6))
    assert manager.execute(make_items((5, 8), (0, 4))) is not None
    stats = manager.get_cumulative_stats()
    assert stats["replays_by_budget"] == {"whole": {4: 2}, "parts": {4: 1}}
    assert (stats["real_tokens"], stats["padded_tokens"]) == (7, 11)
    assert stats["padding_rate"] == pytest.approx(11 / 18)


class NothingIsKnownBefore(ToyAdapter):
    """Without sample input, graphs are compared at their first use."""

    def sample(self, shape: GraphShape, seed: int) -> Any:
        return None

    def capture_buffers(self, shape: GraphShape, arena: BufferArena) -> Any:
        toy = ToyAdapter(self.model, self.vllm_config)
        return toy.capture_buffers(shape, arena)


class UnlikeEager(NothingIsKnownBefore):
    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        return 2 * super().forward(buffers, shape)


def test_items_of_a_graph_dropped_at_its_first_use_are_misses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_toy_manager(monkeypatch, adapter=UnlikeEager)
    batch = make_items((1, 8), (3, 8))
    outputs = manager.execute(batch)
    assert outputs is not None
    for output, expected in zip(outputs, encode_eagerly(batch), strict=True):
        torch.testing.assert_close(output, expected)
    assert manager.stats.hits == 0
    assert manager.stats.misses == {EagerReason.DROPPED_GRAPH: 2}
    assert not manager.stats.replays
    # One graph per path and budget of this width; the whole rows need just one.
    assert manager.stats.graphs == manager.get_cumulative_stats()["num_budgets"] == 10


def test_items_by_which_nothing_can_be_checked_are_misses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_toy_manager(monkeypatch, adapter=NothingIsKnownBefore)
    batch = make_items((1, 8))
    manager.execute(
        {"rows": [torch.full_like(rows, torch.nan) for rows in batch["rows"]]}
    )
    assert manager.stats.misses == {EagerReason.UNCHECKED_GRAPH: 1}
    assert manager.stats.graphs == 12
    assert manager.execute(batch) is not None
    assert manager.stats.hits == 1


def test_time_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_toy_manager(monkeypatch)
    manager.execute(make_items((1, 8)))
    stats = manager.get_cumulative_stats()
    assert stats["replay_seconds"] > 0
    assert stats["eager_seconds"] == 0
    assert stats["timed_batches"] == 1


# -- Lines ----------------------------------------------------------------------


def test_the_line_names_what_vllm_s_lines_name() -> None:
    stats = EncoderStats(hits=30, real_tokens=900, padded_tokens=100)
    stats.misses[EagerReason.CHEAPER_EAGERLY] = 10
    stats.replays[GraphKey("default", 64)] = 7
    stats.replay_seconds = 1.25
    assert stats.log_line() == (
        "Encoder CUDA graphs: Items: 40, Hit rate: 75.0%, Misses: 10 "
        "(cheaper_eagerly: 10), Replays: 7, Eager calls: 0, "
        "Padding: 10.0% of replayed tokens, Replay time: 1.2 s, Eager time: 0.0 s"
    )


@given(cases())
def test_the_table_has_every_replay_and_eager_call(case: Case) -> None:
    table = EncoderCudaGraphTable()
    made = plan(case)
    shapes = shapes_of(case.capacities)
    for _ in range(2):
        table.add(made, shapes)
    steps = [step for each in made.sub_batches for step in each.steps.values()]
    text = table.take({"default": [64, 8]})
    if not steps:
        assert text == ""
        return
    _, header, rule, *rows = text[text.index("Stats:**") :].strip().split("\n")[1:]
    assert [cell.strip() for cell in header.strip("|").split("|")] == list(COLUMNS)
    assert set(rule) == set("|-")
    assert len({len(line) for line in (header, rule, *rows)}) == 1
    counts = []
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        unpadded, padded, paddings, count = (int(cells[i]) for i in (1, 2, 3, 5))
        assert padded - unpadded == paddings >= 0
        assert cells[4] in ("FULL", "NONE")
        assert cells[4] == "FULL" or paddings == 0
        counts.append(count)
    assert sum(counts) == 2 * len(steps)
    assert counts == sorted(counts, reverse=True)
    assert table.take({}) == "", "counts begin anew"


def test_a_table_of_many_kinds_is_cut() -> None:
    table = EncoderCudaGraphTable()
    planner = Planner(graphs(5000), ("default",))
    for tokens in range(1, 2101):
        table.add(planner.plan([item(tokens)]), shapes_of(graphs(5000)))
    text = table.take({"default": [5000]})
    assert "- Token budgets (default): [5000]" in text
    assert text.count("FULL") == MAX_ROWS
    (others,) = re.findall(r"\(others\).*?(\d+) *\|$", text, re.MULTILINE)
    assert int(others) == 2100 - MAX_ROWS
