# SPDX-License-Identifier: Apache-2.0
"""What is done to PyTorch's CUDA when a capture fails or the caller changes streams.

On stand-ins for streams and graphs; the same on a GPU is benchmarks/gpu_faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    BudgetGraphMetadata,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.graphs import CudaGraphRecorder
from vllm_encoder_cg.streams import side_stream


class Stream:
    """Remembers what it waited for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []
        self.synchronized = False

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)

    def synchronize(self) -> None:
        self.synchronized = True


class Cuda:
    """As much of ``torch.cuda`` as a capture needs.

    An operation that cannot be captured raises and invalidates the capture; ending
    it then raises, too, before the books on the pool and on random numbers are
    closed: so does PyTorch 2.11.
    """

    def __init__(self) -> None:
        self.default, self.current = Stream("default"), Stream("capture")
        self.invalid = False
        self.open_pools: dict[Any, int] = {}
        self.generator_captures = False
        self.released: list[Any] = []
        self.pools = 0

    def new_pool(self) -> Any:
        self.pools += 1
        return (0, self.pools)

    def graph(self) -> Any:
        cuda = self

        class Graph:
            pool: Any = None

            def capture_begin(self, pool: Any = None, **mode: str) -> None:
                pool = pool or cuda.new_pool()
                assert pool not in cuda.open_pools, "already recording to the pool"
                self.pool = pool
                cuda.open_pools[pool] = cuda.open_pools.get(pool, 0) + 1
                cuda.generator_captures = True

            def capture_end(self) -> None:
                if self.pool is None:
                    raise RuntimeError("not capturing")
                if cuda.invalid:
                    cuda.invalid = False
                    self.pool = None
                    raise RuntimeError("capture was invalidated")
                del cuda.open_pools[self.pool]
                self.pool = None
                cuda.generator_captures = False

            def replay(self) -> None:
                pass

        return Graph()

    def end_allocate(self, device: int, pool: Any) -> None:
        if pool not in self.open_pools:
            raise RuntimeError("not recording to the pool")
        del self.open_pools[pool]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, cuda.current = cuda.current, stream
        yield
        cuda.current = before

    empty = torch.empty
    for name, value in {
        "CUDAGraph": cuda.graph,
        "current_stream": lambda device=None: cuda.current,
        "default_stream": lambda: cuda.default,
        "stream": on_stream,
        "current_device": lambda: 0,
        "graph_pool_handle": cuda.new_pool,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None: empty(*size))
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", cuda.end_allocate, raising=False
    )
    monkeypatch.setattr(
        torch._C,
        "_cuda_releasePool",
        lambda device, pool: cuda.released.append(pool),
        raising=False,
    )
    return cuda


def make_output(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def forward() -> torch.Tensor:
    return torch.ones(2)


class FailsInCapture:
    """Runs once, then raises; may invalidate the capture."""

    def __init__(self, cuda: Cuda, invalidates: bool) -> None:
        self._cuda = cuda
        self._invalidates = invalidates
        self._calls = 0

    def __call__(self) -> torch.Tensor:
        self._calls += 1
        if self._calls == 2:
            self._cuda.invalid = self._invalidates
            raise RuntimeError("on purpose")
        return torch.ones(2)


@pytest.mark.parametrize("invalidates", [False, True])
def test_a_failed_capture_leaves_nothing_open(cuda: Cuda, invalidates: bool) -> None:
    """The next graph is captured into the same pool, and vLLM can draw samples."""
    recorder = CudaGraphRecorder()
    with pytest.raises(RuntimeError, match="on purpose"):
        recorder.record(FailsInCapture(cuda, invalidates), make_output)
    assert cuda.open_pools == {}
    assert not cuda.generator_captures
    assert len(cuda.released) == invalidates
    graph, output = recorder.record(forward, make_output)
    graph.replay()
    assert output.tolist() == [1, 1]
    assert cuda.open_pools == {} and not cuda.generator_captures


def test_a_capture_that_cannot_be_ended_leaves_nothing_open(cuda: Cuda) -> None:
    """Invalidated by something that raised nothing."""
    calls: list[int] = []

    def invalidates() -> torch.Tensor:
        calls.append(1)
        cuda.invalid = len(calls) == 2
        return torch.ones(2)

    recorder = CudaGraphRecorder()
    with pytest.raises(RuntimeError, match="invalidated"):
        recorder.record(invalidates, make_output)
    assert cuda.open_pools == {} and not cuda.generator_captures


def test_a_failing_forward_begins_no_capture(cuda: Cuda) -> None:
    def fails() -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        CudaGraphRecorder().record(fails, make_output)
    assert cuda.open_pools == {} and not cuda.generator_captures


# -- Streams -----------------------------------------------------------------------


def test_captures_share_one_stream(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps memory for each stream that a product ever ran on."""
    made: list[Stream] = []

    def new_stream(device: int) -> Stream:
        made.append(Stream(f"stream {len(made)}"))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    cuda.current = cuda.default
    side_stream.cache_clear()
    try:
        for _ in range(3):
            CudaGraphRecorder().record(forward, make_output)
    finally:
        side_stream.cache_clear()
    assert len(made) == 1


class Adapter:
    """Notes in which order things happen."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.waits_before_fill: list[list[str]] = []

    def fill(self, batch: Any, indices: Any, buffers: Any, shape: Any) -> None:
        self.waits_before_fill.append(list(self.cuda.current.waited))

    def output_rows(self, batch: Any, indices: Any, path: str) -> int:
        return 1


KEY = GraphKey(DEFAULT_PATH, 1)


@pytest.fixture
def graphs(cuda: Cuda) -> GraphSet:
    graphs = GraphSet.empty(torch.device("cpu"))
    graphs.arena.device = torch.device("cuda")  # where streams are looked at
    graphs.shapes[KEY] = GraphShape(KEY, GraphCapacity(1, 1))
    graphs.graphs[KEY] = BudgetGraphMetadata(
        token_budget=1,
        max_batch_size=1,
        max_frames_per_batch=0,
        graph=SimpleNamespace(replay=lambda: None),
        input_buffers={},
        output_buffer=torch.zeros(1, 2),
        capacity=GraphCapacity(1, 1),
    )
    return graphs


def test_buffers_are_written_after_the_replay_before(
    cuda: Cuda, graphs: GraphSet
) -> None:
    """Of a caller that changes streams, which vLLM's runners do not."""
    adapter: Any = Adapter(cuda)
    first, second = Stream("first"), Stream("second")
    for stream in (first, first, second, second, first):
        cuda.current = stream
        graphs.replay(KEY, adapter, None, [0])
    assert adapter.waits_before_fill == [[], [], ["first"], ["first"], ["second"]]


def test_rows_that_a_graph_does_not_have_are_refused(graphs: GraphSet) -> None:
    """Before anything is copied."""
    adapter: Any = SimpleNamespace(output_rows=lambda *_: 2)
    with pytest.raises(ValueError, match="2 rows are more than the 1"):
        graphs.replay(KEY, adapter, None, [0])


@pytest.mark.parametrize("release", [GraphSet.wait, GraphSet.drop_all])
def test_buffers_are_given_back_after_the_last_replay(
    release: Any, cuda: Cuda, graphs: GraphSet
) -> None:
    adapter: Any = Adapter(cuda)
    cuda.current = stream = Stream("serving")
    graphs.replay(KEY, adapter, None, [0])
    cuda.current = Stream("capturing anew")
    assert not stream.synchronized
    release(graphs)
    assert stream.synchronized


def test_graphs_that_never_ran_are_given_back_at_once(graphs: GraphSet) -> None:
    graphs.drop_all()
    assert graphs.graphs == {}
