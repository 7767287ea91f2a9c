# SPDX-License-Identifier: Apache-2.0
"""Budgets for recorded traffic, and the planner's simulated use of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.observability.trace import read_trace
from vllm_encoder_cg.planning.costs import MeasuredCosts
from vllm_encoder_cg.planning.proposal import (
    UNMEASURED,
    Ladder,
    ProposalLimits,
    estimate_memory,
    known_ladders,
    memory_of,
    propose,
    simulate,
)
from vllm_encoder_cg.planning.traffic import (
    Traffic,
    parse_mix,
    traffic_of_mix,
    traffic_of_trace,
)

GIB = 2**30


def images(*batches: tuple[int, ...], max_tokens: int = 4096) -> Traffic:
    """One batch per tuple of token counts."""
    counted = {tuple((t,) for t in sorted(batch)): 1.0 for batch in batches}
    return Traffic(counted, 64, max_tokens)


def ladder(*budgets: int, max_items: int = 8) -> Ladder:
    return Ladder({"default": budgets}, max_items)


TRAFFIC = st.lists(
    st.lists(st.integers(1, 3000), min_size=1, max_size=6).map(tuple),
    min_size=1,
    max_size=12,
).map(lambda batches: images(*batches))


@settings(max_examples=60)
@given(TRAFFIC, st.integers(1, 12))
def test_a_proposal_keeps_limits_and_beats_the_ladders(
    traffic: Traffic, max_graphs: int
) -> None:
    memory = estimate_memory()
    limits = ProposalLimits(max_graphs, memory_gib=4.0)
    proposed, outcome = propose(traffic, limits, UNMEASURED, memory)
    (budgets,) = proposed.budgets.values()
    assert len(budgets) <= max_graphs
    assert memory_of(proposed, memory) <= 4.0 * GIB
    # What vLLM requires of a list of budgets together with a number of items.
    assert proposed.max_items <= budgets[0]
    assert outcome == simulate(traffic, proposed, UNMEASURED)
    for known in known_ladders(traffic, max_graphs).values():
        if known.graphs <= max_graphs:
            assert outcome.cost <= simulate(traffic, known, UNMEASURED).cost


def test_sizes_that_recur_need_no_padding() -> None:
    traffic = images((300,), (100,), (768,), (300, 100))
    proposed, outcome = propose(
        traffic, ProposalLimits(8), UNMEASURED, estimate_memory()
    )
    assert proposed == ladder(100, 300, 400, 768)
    assert (outcome.padding, outcome.hit_rate) == (0.0, 1.0)


def test_the_simulation_is_the_planner() -> None:
    traffic = images((300,), (100, 100), (5000,))
    outcome = simulate(traffic, ladder(256, 512), UNMEASURED)
    assert (outcome.items, outcome.hits, outcome.replays) == (4, 3, 2)
    assert (outcome.real_tokens, outcome.padded_tokens) == (500, 268)
    assert outcome.eager_calls == 1
    assert outcome.demands == {"default": {300: 1, 200: 1, 5000: 1}}


def test_a_graph_of_whole_tiles_computes_more_than_its_budget() -> None:
    traffic = Traffic({((150,),): 1.0}, 144, 200, {"default": 144})
    outcome = simulate(traffic, ladder(200), UNMEASURED)
    assert outcome.padded_tokens == 2 * 144 - 150


def test_items_per_replay_count() -> None:
    outcome = simulate(images((10,) * 6), ladder(64, max_items=2), UNMEASURED)
    assert outcome.replays == 3


def test_memory_leaves_the_largest_out() -> None:
    traffic = images(*[(100,)] * 5, (1000,), (4000,))
    memory = estimate_memory()
    limits = ProposalLimits(8, memory_gib=memory.bytes_of(1500, 2) / GIB)
    proposed, outcome = propose(traffic, limits, UNMEASURED, memory)
    assert proposed.budgets["default"][-1] == 1000
    assert outcome.eager_calls == 1


def test_memory_for_nothing_is_refused() -> None:
    limits = ProposalLimits(8, memory_gib=1e-6)
    with pytest.raises(ValueError, match=r"memory-gib: got 1e-06"):
        propose(images((100,)), limits, UNMEASURED, estimate_memory())


def test_no_traffic_is_refused() -> None:
    with pytest.raises(ValueError, match="no batch"):
        propose(Traffic({}, 64, 4096), ProposalLimits(8), UNMEASURED, estimate_memory())


def test_no_budget_is_below_the_number_of_items() -> None:
    """vLLM's start refuses that."""
    limits = ProposalLimits(4, largest=5)
    proposed, _ = propose(images((3,)), limits, UNMEASURED, estimate_memory())
    assert proposed == ladder(5, max_items=5)
    with pytest.raises(ValueError, match="largest: got 5, less than max-items, 6"):
        limits = ProposalLimits(4, max_items=6, largest=5)
        propose(images((3,)), limits, UNMEASURED, estimate_memory())


def test_a_largest_budget_for_what_was_not_recorded() -> None:
    limits = ProposalLimits(4, largest=4096)
    proposed, _ = propose(images((100,)), limits, UNMEASURED, estimate_memory())
    assert proposed.budgets == {"default": (100, 4096)}


def test_measured_times_decide() -> None:
    """Beyond 1000 tokens eager is faster here, so that no graph is made for it."""
    costs = MeasuredCosts(
        {GraphKey("default", 100): 1.0, GraphKey("default", 4000): 60.0},
        {"default": {1: 10.0, 4000: 12.0}},
    )
    traffic = images((100,), (300,), (4000,))
    proposed, outcome = propose(traffic, ProposalLimits(8), costs, estimate_memory())
    assert proposed.budgets["default"] == (100, 300)
    assert outcome.eager_calls == 1


def test_a_larger_graph_that_is_faster_is_proposed() -> None:
    costs = MeasuredCosts(
        {
            GraphKey("default", b): ms
            for b, ms in ((64, 2), (300, 5), (320, 4), (512, 6))
        },
        {"default": {1: 20.0, 4000: 40.0}},
    )
    traffic = images((300,), (290,), (64,))
    proposed, _ = propose(traffic, ProposalLimits(2), costs, estimate_memory())
    assert proposed.budgets["default"] == (64, 320)


@settings(max_examples=30)
@given(
    TRAFFIC,
    st.dictionaries(st.sampled_from(range(64, 4097, 64)), st.floats(1, 50), min_size=2),
)
def test_uneven_times_do_no_harm(traffic: Traffic, replay_ms: dict[int, float]) -> None:
    costs = MeasuredCosts(
        {GraphKey("default", budget): ms for budget, ms in replay_ms.items()},
        {"default": {1: 100.0, 4096: 200.0}},
    )
    proposed, outcome = propose(traffic, ProposalLimits(64), costs, estimate_memory())
    for known in known_ladders(traffic).values():
        if known.graphs <= 64:
            other = simulate(traffic, known, costs)
            assert outcome.cost <= other.cost + 1e-6
    assert proposed.max_items <= proposed.budgets["default"][0]


def test_paths_have_one_list() -> None:
    batches = {((273, 300),): 2.0, ((273, 0),): 1.0}
    traffic = Traffic(batches, 273, 8192, {"global": 273, "local": 100})
    proposed, outcome = propose(
        traffic, ProposalLimits(4), UNMEASURED, estimate_memory()
    )
    assert proposed.budgets["global"] == proposed.budgets["local"] == (273, 300)
    assert (outcome.hits, outcome.replays, outcome.padding) == (3, 5, 0.0)


def test_memory_follows_what_was_recorded() -> None:
    memory = estimate_memory({"default": (64, 1024)}, GIB)
    assert memory.bytes_of(1024, 2) == pytest.approx(GIB)
    assert estimate_memory({"default": ()}, 0) == estimate_memory()


@pytest.mark.parametrize(
    ("text", "mix"),
    [
        ("640x480*0.5,300*0.5", {300: 1.0}),
        ("320x320", {100: 1.0}),
        ("video:16x448x448*2, 49", {14 * 14 * 8: 2.0, 49: 1.0}),
    ],
)
def test_mixes(text: str, mix: dict[int, float]) -> None:
    assert parse_mix(text) == mix


@pytest.mark.parametrize("text", ["", "640", "0x10", "640x480*0", "0", "a", "1x2x3"])
def test_wrong_mixes_name_the_entry(text: str) -> None:
    if text == "640":
        assert parse_mix(text) == {640: 1.0}
        return
    with pytest.raises(ValueError, match=r"items: got"):
        parse_mix(f"100,{text}")


def test_drawn_batches_are_the_same_each_time() -> None:
    first = traffic_of_mix({100: 1.0, 300: 2.0}, 64, 4096, range(1, 5))
    assert first == traffic_of_mix({100: 1.0, 300: 2.0}, 64, 4096, range(1, 5))
    assert first.most_items == 4


def test_ranks_share_the_items_of_a_batch() -> None:
    batch, alone = ((100,), (100,), (300,)), ((50,),)
    traffic = images((100, 100, 300), (50,))
    assert [traffic.shares(each) for each in (batch, alone)] == [[batch], [alone]]
    traffic = replace(traffic, ranks=2)
    assert traffic.shares(batch) == [((300,),), ((100,), (100,))]
    assert traffic.shares(alone) == [alone]
    assert traffic.most_items == 2


def test_counts_are_of_all_ranks_and_the_slowest_takes_the_time() -> None:
    traffic = images((100, 100, 300), (50,), (900,))
    ladder = Ladder({"default": (128, 256, 512)}, 8)
    outcome = simulate(replace(traffic, ranks=2), ladder, UNMEASURED)
    assert (outcome.batches, outcome.items, outcome.hits) == (3, 5, 4)
    assert (outcome.replays, outcome.eager_calls) == (3, 1)
    assert outcome.real_tokens == 300 + 200 + 50
    assert outcome.padded_tokens == (512 - 300) + (256 - 200) + (128 - 50)
    slowest = images((300,), (50,), (900,))
    assert outcome.cost == simulate(slowest, ladder, UNMEASURED).cost


def test_thinning_keeps_an_even_choice() -> None:
    traffic = images(*[(t,) for t in range(1, 101)])
    assert len(traffic.thinned(30).batches) == 25
    assert traffic.thinned(100) is traffic


def test_a_trace_becomes_traffic(tmp_path: Path) -> None:
    header = {
        "format": "vllm-encoder-cg-trace",
        "version": 1,
        "architecture": "Model",
        "min_tokens": 64,
        "max_tokens": 8192,
        "paths": {"default": {"granularity": 4, "budgets": [64, 8192]}},
        "max_items": 16,
        "memory_bytes": GIB,
    }
    lines = [header, {"modality": "image", "tokens": [300, 64]}] + [
        {"modality": "video", "tokens": [1024]}
    ] * 2
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    traffic = traffic_of_trace(read_trace(file))
    assert traffic.batches == {((64,), (300,)): 1, ((1024,),): 2}
    assert (traffic.min_tokens, traffic.max_tokens) == (64, 8192)
    assert traffic.paths == {"default": 4}
    assert traffic.recorded_budgets == {"default": (64, 8192)}
    assert (traffic.recorded_items, traffic.recorded_memory_bytes) == (16, GIB)
