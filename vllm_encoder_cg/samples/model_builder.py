# SPDX-License-Identifier: Apache-2.0
"""Builds a vLLM model class without an engine: no scheduler, no KV cache.

What ``verify``, ``bench`` and the tests of the adapters need is the encoder
with its weights, which is built in seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_encoder_cg.integration.random_loader import (
    LOAD_FORMAT,
    register_random_loader,
)


def inspect_in_process() -> None:
    """Has vLLM read a model class's properties here instead of in a new process.

    vLLM does it elsewhere to keep this process clear of CUDA, at the price of
    importing itself again for every architecture it has not seen.  Whoever builds a
    model alone imports its class in this process anyway.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda inspect: inspect()


def make_vllm_config(
    model: str | Path,
    *,
    attention_backend: str | None = None,
    compilation_config: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    load_format: str = LOAD_FORMAT,
    seed: int = 0,
    max_tokens: int = 16384,
    **engine_args: Any,
) -> Any:
    """A ``VllmConfig`` with encoder CUDA graphs on.

    Args:
        model: a name or folder, as ``vllm serve`` takes it.
        attention_backend: as ``--mm-encoder-attn-backend``.
        compilation_config: more of its fields.
        settings: ``additional_config["encoder_cg"]``.
        max_tokens: ``max_model_len`` and ``max_num_batched_tokens``, and so the
            largest budget.
        engine_args: further fields of ``EngineArgs``.
    """
    from vllm.engine.arg_utils import EngineArgs

    register_random_loader()
    inspect_in_process()
    if load_format == LOAD_FORMAT:
        engine_args.setdefault("model_loader_extra_config", {"seed": seed})
    if attention_backend is not None:
        engine_args["mm_encoder_attn_backend"] = attention_backend
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": load_format,
        "max_model_len": max_tokens,
        "max_num_batched_tokens": max_tokens,
        "enforce_eager": True,
        "compilation_config": {
            "cudagraph_mm_encoder": True,
            **(compilation_config or {}),
        },
        "additional_config": {"encoder_cg": settings or {}},
    } | engine_args
    return EngineArgs(**arguments).create_engine_config()


@contextlib.contextmanager
def single_rank(vllm_config: Any) -> Iterator[None]:
    """Makes vLLM's process groups for one rank, where there are none yet, and
    `vllm_config` the current one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_open_port

    with set_current_vllm_config(vllm_config):
        if not model_parallel_is_initialized():
            backend = "gloo" if current_platform.is_cpu() else "nccl"
            init_distributed_environment(
                world_size=1,
                rank=0,
                local_rank=0,
                distributed_init_method=f"tcp://127.0.0.1:{get_open_port()}",
                backend=backend,
            )
            # Without a model in view vLLM also makes the expert-parallel group,
            # which a later model of this process may want.
            with set_current_vllm_config(VllmConfig()):
                ensure_model_parallel_initialized(1, 1)
        yield


def build_model(vllm_config: Any) -> Any:
    """The loaded model, in evaluation mode, on the configured device.

    Call it inside ``single_rank`` (or a worker's own set-up), and keep that
    context for as long as the model runs.
    """
    from vllm.model_executor.model_loader import get_model

    model = get_model(vllm_config=vllm_config).eval()
    if vllm_config.device_config.device_type == "cpu":
        _make_inputs_contiguous(model)
    return model


def numbered_device(vllm_config: Any) -> Any:
    """The configured ``torch.device`` with its number, as vLLM's worker gives it:
    PyTorch otherwise looks for the current one at each call."""
    import torch

    device = vllm_config.device_config.device
    if device.type != "cuda":
        return device
    return torch.device(device.type, torch.cuda.current_device())


def _make_inputs_contiguous(model: Any) -> None:
    """Lets Llama 4's patch embedding, whose input is transposed, run on vLLM's
    linear layers for CPUs, which refuse that."""
    for module in model.modules():
        if type(module).__name__ == "Llama4UnfoldConvolution":
            module.linear.register_forward_pre_hook(
                lambda _, inputs: (inputs[0].contiguous(), *inputs[1:])
            )
