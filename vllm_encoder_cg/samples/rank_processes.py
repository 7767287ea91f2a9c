# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks of one tensor-parallel group, without an engine.

A process per rank, each on a GPU of its own, or sharing those that there are; without
GPUs, on the CPU with gloo.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


class RankError(RuntimeError):
    """A rank raised, ended or took too long; the message has its traceback."""


def run_on_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, timeout_s: float = 600.0
) -> list[Any]:
    """What ``function(rank, size, *arguments)`` returns on each rank, by rank.

    Args:
        function: of a module's top level; it, its arguments and its result are
            pickled.
        timeout_s: for all ranks together.

    Raises:
        RankError: a rank did not return; the others are ended.
    """
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_open_port

    port = get_open_port()
    if current_platform.is_cpu():
        # Imports vLLM once for all ranks.
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["vllm.model_executor.model_loader"])
    else:
        context = multiprocessing.get_context("spawn")
    processes = []
    ends: dict[Connection, int] = {}
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(theirs, function, rank, size, port, arguments)
        )
        process.start()
        theirs.close()
        processes.append(process)
        ends[ours] = rank
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while ends:
            ready = wait(list(ends), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(
                    f"ranks {sorted(ends.values())} took more than {timeout_s:.0f} s"
                )
            for end in ready:
                assert isinstance(end, Connection)
                rank = ends.pop(end)
                results[rank] = _receive(end, rank)
    finally:
        if len(results) < size:
            for process in processes:
                process.terminate()
        for process in processes:
            process.join(timeout=30 if len(results) == size else 5)
            if process.is_alive():
                process.kill()
                process.join()
    return [results[rank] for rank in range(size)]


def _receive(end: Connection, rank: int) -> Any:
    try:
        returned, value = end.recv()
    except EOFError:
        raise RankError(f"rank {rank} ended without a result") from None
    if not returned:
        raise RankError(f"rank {rank} raised:\n{value}")
    return value


def _run(
    end: Connection,
    function: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    arguments: tuple[Any, ...],
) -> None:
    try:
        join(rank, size, port)
        result = function(rank, size, *arguments)
        end.send((True, result))
    except BaseException:
        end.send((False, traceback.format_exc()))
        end.close()
        # Threads of a process group may wait for ranks that do not come any more.
        os._exit(1)
    end.close()
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def join(rank: int, size: int, port: int) -> None:
    """Makes this process a rank of vLLM's tensor-parallel group of `size`."""
    # One name per rank keeps vLLM's CPU build from shared memory, whose waiting
    # ranks keep their cores busy: gloo does the same.
    os.environ.setdefault("VLLM_DIST_IDENT", f"rank-{rank}")

    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.platforms import current_platform

    local_rank = rank
    if current_platform.is_cpu():
        torch.set_num_threads(1)
    else:
        gpus = torch.accelerator.device_count()
        if gpus < size:
            _share_gpus(rank)
        local_rank = rank % gpus
        torch.accelerator.set_device_index(local_rank)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=size,
            rank=rank,
            local_rank=local_rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            backend="gloo" if current_platform.is_cpu() else "nccl",
        )
        ensure_model_parallel_initialized(size, 1)


def _share_gpus(rank: int) -> None:
    """Lets ranks have a GPU in common, which is slow, but exchanges the same."""
    from vllm.distributed.parallel_state import set_custom_all_reduce

    # NCCL refuses a second rank on a GPU of the same host, so each names another host;
    # they then reach each other over the loopback interface.
    os.environ |= {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    # It maps the memory of other GPUs.
    set_custom_all_reduce(False)
