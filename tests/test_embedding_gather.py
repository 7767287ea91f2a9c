# SPDX-License-Identifier: Apache-2.0
"""The exchange between ranks, even and uneven, for any number of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_encoder_cg.adapter import EncoderBatch
from vllm_encoder_cg.batch_executor import BatchExecutor
from vllm_encoder_cg.data_parallel import EmbeddingGather
from vllm_encoder_cg.definitions import EncoderItemSpec
from vllm_encoder_cg.planning.planner import Planner
from vllm_encoder_cg.planning.sharding import Assignment, assign_items, weigh_items
from vllm_encoder_cg.ranks import EncoderMode, EncoderRanks, OutOfStepError

WIDTH = 3


class Group:
    """vLLM's group as one rank sees it, given what every rank puts in."""

    def __init__(self, size: int, rank: int) -> None:
        self.world_size = size
        self.rank_in_group = rank
        self.given: list[torch.Tensor] = []
        self.calls: list[str] = []

    def all_gather(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        self.calls.append("even")
        assert {part.shape for part in self.given} == {rows.shape}
        return torch.cat(self.given, dim)

    def all_gatherv(
        self, rows: torch.Tensor, dim: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        self.calls.append("uneven")
        assert [len(part) for part in self.given] == sizes
        return torch.cat(self.given, dim)


def make_gathers(size: int, uneven_cost: float = math.inf) -> list[EmbeddingGather]:
    """One per rank."""
    gathers = []
    for rank in range(size):
        ranks = EncoderRanks(EncoderMode.DATA, Group(size, rank))
        gather = EmbeddingGather(ranks, WIDTH, torch.float32, torch.device("cpu"))
        gather.uneven_cost = uneven_cost
        gathers.append(gather)
    return gathers


def embedding(item: int, tokens: int) -> torch.Tensor:
    """Distinct values for every item and row."""
    rows = torch.arange(tokens, dtype=torch.float32)[:, None] + 1000 * (item + 1)
    return rows.expand(tokens, WIDTH).clone()


def exchange(
    gathers: list[EmbeddingGather], tokens: list[int], assignment: Assignment
) -> list[list[torch.Tensor]]:
    """What every rank gets."""
    specs = [EncoderItemSpec(4 * count, count) for count in tokens]
    rows = [
        gather.pack([embedding(i, tokens[i]) for i in items], specs, assignment)
        for gather, items in zip(gathers, assignment.items, strict=True)
    ]
    for gather in gathers:
        gather._ranks.group.given = rows
    return [
        gather.gather(own, specs, assignment)
        for gather, own in zip(gathers, rows, strict=True)
    ]


def assign(tokens: list[int], ranks: int) -> Assignment:
    specs = [EncoderItemSpec(4 * count, count) for count in tokens]
    return assign_items(specs, ranks, weigh_items(specs, None))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=8),
    st.integers(2, 8),
    st.sampled_from([math.inf, 1.2, 0.1]),
)
def test_every_rank_gets_the_batch_in_order(
    tokens: list[int], ranks: int, uneven_cost: float
) -> None:
    gathers = make_gathers(ranks, uneven_cost)
    expected = [embedding(i, count) for i, count in enumerate(tokens)]
    for embeddings in exchange(gathers, tokens, assign(tokens, ranks)):
        assert len(embeddings) == len(expected)
        assert all(map(torch.equal, embeddings, expected))
    assert len({tuple(gather._ranks.group.calls) for gather in gathers}) == 1


@pytest.mark.parametrize(
    ("tokens", "uneven_cost", "moved"),
    [
        ([8, 8], 1.2, "even"),
        ([8, 7], 1.2, "even"),
        ([8, 2], 1.2, "uneven"),
        ([8, 2], 2.0, "even"),
        ([8], 1.2, "uneven"),
        ([8], math.inf, "even"),
    ],
)
def test_moves_the_rows_there_are_where_that_is_sooner(
    tokens: list[int], uneven_cost: float, moved: str
) -> None:
    gathers = make_gathers(2, uneven_cost)
    exchange(gathers, tokens, assign(tokens, 2))
    assert gathers[0]._ranks.group.calls == [moved]


def test_nothing_is_moved_where_there_is_nothing() -> None:
    gathers = make_gathers(2)
    assert exchange(gathers, [], assign([], 2)) == [[], []]
    for embeddings in exchange(gathers, [0, 0], assign([0, 0], 2)):
        assert [tuple(each.shape) for each in embeddings] == [(0, WIDTH)] * 2
    assert gathers[0]._ranks.group.calls == []


def test_outputs_do_not_alias_what_was_put_in() -> None:
    tokens = [4, 4]
    gathers = make_gathers(2)
    embeddings = exchange(gathers, tokens, assign(tokens, 2))[0]
    for rows in gathers[0]._ranks.group.given:
        rows.fill_(float("nan"))
    assert not any(each.isnan().any() for each in embeddings)


def test_memory_that_lacks_is_noticed_before_the_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all ranks may still leave the batch to the model."""
    gather = make_gathers(2)[0]
    allocate = gather._empty

    def at_most_four(rows: int) -> torch.Tensor:
        if rows > 4:
            raise torch.cuda.OutOfMemoryError("of the test")
        return allocate(rows)

    monkeypatch.setattr(gather, "_empty", at_most_four)
    specs = [EncoderItemSpec(16, 4)] * 2
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gather.pack([embedding(0, 4)], specs, assign([4, 4], 2))


def test_an_exchange_that_fails_is_an_error_that_names_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gather = make_gathers(2)[1]
    ranks = gather._ranks
    monkeypatch.setattr(ranks, "vote", lambda yes, us: (yes, [us, us]))
    monkeypatch.setattr(gather, "gather", Mock(side_effect=RuntimeError("closed")))
    specs = [EncoderItemSpec(16, 4)] * 2
    batch = EncoderBatch("image", specs, {}, None)
    executor = BatchExecutor(
        Mock(parse=lambda mm_kwargs: batch),
        Planner({}, ("default",)),
        Mock(run=lambda batch, plan: ([embedding(1, 4)], plan)),
        ranks,
        gather,
        None,
        Mock(),
    )
    with pytest.raises(OutOfStepError, match=r"rank 1 of 2.*closed"):
        executor.execute({})


@pytest.mark.parametrize("shape", [(3, WIDTH), (4, WIDTH + 1)])
def test_a_wrong_embedding_is_refused(shape: tuple[int, int]) -> None:
    gather = make_gathers(2)[0]
    specs = [EncoderItemSpec(16, 4)]
    with pytest.raises(ValueError, match=r"item 0 has an embedding of shape"):
        gather.pack([torch.zeros(shape)], specs, assign([4], 2))


def test_other_types_are_cast() -> None:
    gather = make_gathers(2)[0]
    specs = [EncoderItemSpec(16, 4)]
    rows = gather.pack([torch.ones(4, WIDTH).double()], specs, assign([4], 2))
    assert rows.dtype == torch.float32 and bool((rows == 1).all())


def test_a_backend_without_uneven_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = make_gathers(2)[0]

    def refuse(rows: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError

    monkeypatch.setattr(gather._ranks.group, "all_gatherv", refuse, raising=False)
    gather.measure()
    assert gather.uneven_cost == math.inf
    assert not gather.is_uneven([1, 1000])
