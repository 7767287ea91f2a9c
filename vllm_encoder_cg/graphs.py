# SPDX-License-Identifier: Apache-2.0
"""Recording and replaying one forward.

``CudaGraphRecorder`` captures a CUDA graph.  ``StaticRecorder`` is for machines
without a GPU: replay runs the recorded forward again on the same buffers, so
that buffers, padding, packing and assembly are the same code and only the
launch differs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from vllm_encoder_cg.streams import side_stream

Forward = Callable[[], torch.Tensor]
MakeOutput = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class ReplayableGraph(Protocol):
    """What a recorder returns."""

    def replay(self) -> None:
        """Computes the output buffer from the input buffers, on the current
        stream."""
        ...


class GraphRecorder(Protocol):
    """Records forwards that take no arguments and read captured buffers."""

    def record(
        self, forward: Forward, make_output: MakeOutput, *, warm_up: bool = True
    ) -> tuple[ReplayableGraph, torch.Tensor]:
        """The graph and the output buffer that it writes, from `make_output`.

        Args:
            warm_up: whether to run the forward once uncaptured before: a first one
                loads libraries, compiles kernels and grows workspaces.

        Raises:
            Exception: whatever the forward or the capture raised; nothing of
                the attempt is kept.
        """
        ...


class StaticReplay:
    """Runs a forward again and copies its result to the output buffer."""

    def __init__(self, forward: Forward, output: torch.Tensor) -> None:
        self._forward = forward
        self._output = output

    def replay(self) -> None:
        with torch.inference_mode():
            self._output.copy_(self._forward())


class StaticRecorder:
    """Records for a device without CUDA graphs."""

    def record(
        self, forward: Forward, make_output: MakeOutput, *, warm_up: bool = True
    ) -> tuple[ReplayableGraph, torch.Tensor]:
        with torch.inference_mode():
            result = forward()
            output = make_output(tuple(result.shape), result.dtype)
        return StaticReplay(forward, output), output


class CudaGraphRecorder:
    """Captures CUDA graphs into one memory pool.

    Args:
        graph_pool: a pool handle, as ``torch.cuda.graph_pool_handle()`` makes
            it; None: a pool of its own.
    """

    def __init__(self, graph_pool: Any = None) -> None:
        self._pool = graph_pool
        self._recorded: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def _live_pool(self) -> Any:
        """The pool to capture into.

        With the last graph of a pool PyTorch forgets the pool and refuses its
        handle from then on, so that another pool takes the place of one whose
        graphs are gone.
        """
        if not self._recorded and self._pool in self._used_pools:
            self._pool = None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._used_pools.add(self._pool)
        return self._pool

    _used_pools: ClassVar[set[Any]] = set()

    def _capture_stream(self) -> torch.cuda.Stream:
        """The caller's stream (vLLM captures on one of its own, which carries
        its collectives), or one of ours where that is the default stream, which
        cannot be captured."""
        current = torch.cuda.current_stream()
        if current != torch.cuda.default_stream():
            return current
        return side_stream("capture", torch.cuda.current_device())

    def record(
        self, forward: Forward, make_output: MakeOutput, *, warm_up: bool = True
    ) -> tuple[ReplayableGraph, torch.Tensor]:
        stream = self._capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            if warm_up:
                result = forward()
                # Before the capture, as it may allocate.
                make_output(tuple(result.shape), result.dtype)
                del result
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(): it collects garbage and empties the
            # allocator's cache each time, most of the time of a capture.
            stream.synchronize()
            # Where nothing ran before, the driver may yet have kernels to load,
            # which only the last mode permits.
            mode = "global" if warm_up else "relaxed"
            pool = self._live_pool()
            try:
                graph.capture_begin(pool=pool, capture_error_mode=mode)
                result = forward()
                output = make_output(tuple(result.shape), result.dtype)
                output.copy_(result)
                del result
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        self._recorded.add(graph)
        torch.cuda.current_stream().wait_stream(stream)
        return graph, output

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that failed, so that PyTorch works on as before it.

        An operation that must not be captured invalidates the capture.  PyTorch
        then raises before it has closed its own books: the pool stays in use, into
        which nothing can be captured any more and whose memory is never given
        back; and the default generator believes that it is being captured, so that
        the next random number, in vLLM's sampler, raises.  The next graph gets a
        pool of its own, since the allocator of pinned memory cannot be told.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            device = torch.cuda.current_device()
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device, self._pool)
                torch._C._cuda_releasePool(device, self._pool)
            self._pool = None
        with contextlib.suppress(RuntimeError):
            scratch = torch.empty(1, device="cuda")
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin()
            scratch.zero_()
            empty.capture_end()


def make_recorder(device: torch.device, graph_pool: Any) -> GraphRecorder:
    """The recorder for `device`."""
    if device.type == "cuda":
        return CudaGraphRecorder(graph_pool)
    return StaticRecorder()
