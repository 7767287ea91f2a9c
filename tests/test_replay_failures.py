# SPDX-License-Identifier: Apache-2.0
"""A batch that fails on its way costs itself its graphs, and nobody anything else.

An exception inside ``execute`` would end vLLM's engine, and with it every request.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.toy_adapter import ToyAdapter, ToyModel, encode_eagerly, make_items
from tests.support.toy_manager import make_toy_manager
from vllm_encoder_cg.adapter import EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.manager import EncoderCudaGraphManager

ITEMS = ((2, 8), (0, 8), (3, 4))
FAILURES: list[Callable[[], Exception]] = [
    lambda: torch.OutOfMemoryError("no memory, on purpose"),
    lambda: RuntimeError("on purpose"),
    lambda: AssertionError("on purpose"),
    lambda: KeyError("on purpose"),
    lambda: MemoryError(),
    lambda: StopIteration(),
    lambda: NotImplementedError("on purpose"),
    lambda: RecursionError("on purpose"),
]


class Fails(ToyAdapter):
    """Raises where it is told to."""

    where: str | None = None
    failure: Callable[[], Exception] = staticmethod(FAILURES[0])

    def _maybe_fail(self, where: str) -> None:
        if self.where == where:
            raise self.failure()

    def parse(self, mm_kwargs: dict[str, Any]) -> EncoderBatch | None:
        self._maybe_fail("parse")
        return super().parse(mm_kwargs)

    def fill(self, *arguments: Any) -> None:
        self._maybe_fail("fill")
        super().fill(*arguments)

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        self._maybe_fail("forward")
        return super().forward(buffers, shape)

    def output_rows(self, *arguments: Any) -> int | None:
        self._maybe_fail("output_rows")
        return super().output_rows(*arguments)

    def eager(self, *arguments: Any) -> torch.Tensor:
        self._maybe_fail("eager")
        return super().eager(*arguments)

    def assemble(self, *arguments: Any) -> list[torch.Tensor]:
        self._maybe_fail("assemble")
        return super().assemble(*arguments)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> EncoderCudaGraphManager:
    return make_toy_manager(monkeypatch, adapter=Fails)


@pytest.fixture
def adapter(manager: EncoderCudaGraphManager) -> Fails:
    assert isinstance(manager.adapter, Fails)
    return manager.adapter


def assert_next_is_right(manager: EncoderCudaGraphManager) -> None:
    for seed in range(3):
        items = make_items(*ITEMS, seed=seed)
        outputs = manager.execute(items)
        assert outputs is not None
        for output, expected in zip(outputs, encode_eagerly(items), strict=True):
            torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    "where", ["parse", "fill", "forward", "output_rows", "eager", "assemble"]
)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda make: type(make()).__name__)
def test_it_goes_to_the_model_and_the_next_one_is_right(
    where: str,
    failure: Callable[[], Exception],
    manager: EncoderCudaGraphManager,
    adapter: Fails,
) -> None:
    adapter.where, adapter.failure = where, failure
    # One item has a width without graphs, so that a part is eager.
    items = make_items(*ITEMS, (1, 5))
    assert manager.execute(items) is None
    assert manager.stats.misses[EagerReason.FAILED] == (1 if where == "parse" else 4)
    adapter.where = None
    assert_next_is_right(manager)


def test_it_is_said_once(
    manager: EncoderCudaGraphManager,
    adapter: Fails,
    package_log: pytest.LogCaptureFixture,
) -> None:
    """A month of the same would fill the disk."""
    adapter.where = "fill"
    for _ in range(50):
        assert manager.execute(make_items(*ITEMS)) is None
    said = [r for r in package_log.records if "could not run a batch" in r.getMessage()]
    assert len(said) == 1 and "no memory, on purpose" in package_log.text
    assert manager.stats.misses[EagerReason.FAILED] == 150


def test_its_tensors_are_given_back(
    manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a failure held would be missing to the model's own path."""
    held: list[weakref.ref[torch.Tensor]] = []

    def fails(rows: torch.Tensor) -> torch.Tensor:
        intermediate = rows * 2
        held.append(weakref.ref(intermediate))
        raise torch.OutOfMemoryError("no memory, on purpose")

    monkeypatch.setattr(ToyModel, "encode", staticmethod(fails))
    assert manager.execute(make_items(*ITEMS)) is None
    assert held and all(ref() is None for ref in held)


def test_an_observer_that_fails_changes_nothing(
    manager: EncoderCudaGraphManager,
) -> None:
    def observer(*_: Any) -> None:
        raise RuntimeError("on purpose")

    manager.observer = observer
    assert_next_is_right(manager)


def test_what_cannot_be_captured_gives_its_tensors_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    class FailsInForward(ToyAdapter):
        def forward(
            self, buffers: dict[str, torch.Tensor], shape: GraphShape
        ) -> torch.Tensor:
            result = super().forward(buffers, shape)
            if shape.key.token_budget == 4:
                held.append(weakref.ref(result))
                raise torch.OutOfMemoryError("no memory, on purpose")
            return result

    manager = make_toy_manager(monkeypatch, adapter=FailsInForward)
    assert held and all(ref() is None for ref in held)
    assert {key.token_budget for key in manager._graphs.graphs} == {2, 8}
    assert {key.token_budget for key in manager._graphs.dropped} == {4}
    assert_next_is_right(manager)


def test_buffers_of_the_largest_graph_go_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were made for more than any graph that is left reads."""

    class FailsAtTheLargest(ToyAdapter):
        def forward(
            self, buffers: dict[str, torch.Tensor], shape: GraphShape
        ) -> torch.Tensor:
            if shape.key.token_budget == 8:
                raise torch.OutOfMemoryError("no memory, on purpose")
            return super().forward(buffers, shape)

    whole = make_toy_manager(monkeypatch)._graphs
    left = make_toy_manager(monkeypatch, adapter=FailsAtTheLargest)._graphs
    assert {key.token_budget for key in left.graphs} == {2, 4}
    assert left.arena.nbytes() == whole.arena.nbytes() // 2
