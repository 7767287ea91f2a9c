# SPDX-License-Identifier: Apache-2.0
"""Random weights of a real scale for any model that vLLM built.

vLLM's own ``load_format="dummy"`` draws every weight from [-0.001, 0.001]. Such
a model forgets its input: attention hardly changes the output, and a wrong
answer looks like a right one. The weights made here keep activations at the
size that trained weights give them, so that a comparison means something.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_CPU_DRAW_ELEMENTS = 1 << 18
"""Tensors with more elements are drawn on the device that holds them."""
_ZERO_CENTRED_NORMS = frozenset({"GemmaRMSNorm", "Gemma3RMSNorm"})
"""Norms that multiply by (1 + weight), whose weights are therefore near zero."""
_SCALE_NAMES = frozenset({"ls1", "ls2", "scale", "per_expert_scale", "layer_scalar"})
"""Per-channel multipliers that are not inside a norm."""
_OFFSET_BUFFERS = frozenset({"std_bias"})
_SCALE_BUFFERS = frozenset({"std_scale"})
"""Checkpoint buffers that constructors leave at a value without effect."""


@dataclass(frozen=True)
class _Draw:
    """A normal distribution for one tensor."""

    mean: float
    std: float


@dataclass(frozen=True)
class _Piece:
    """One unsharded tensor of a checkpoint and how it enters its parameter."""

    suffix: str
    """Distinguishes the pieces of one parameter (``"q"``, ``"0"``)."""
    shape: tuple[int, ...]
    """In full, as a checkpoint would hold it."""
    load: Callable[[torch.Tensor], Any]
    """Copies the full tensor's shard of this rank into the parameter."""


def fill_with_random_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill a vLLM model, in place, with random weights of a real scale.

    Matrices, convolutions and embeddings are normal with standard deviation
    ``1 / sqrt(fan_in)``, norm weights and layer scales are near 1, biases have a
    standard deviation of 0.02. Values depend on the seed and on a parameter's
    name alone, not on the order of filling. Under tensor parallelism every rank
    holds its shard of the tensor that a single rank would hold; vLLM's
    tensor-parallel group is used if there is one.

    Call it before vLLM's ``process_weights_after_loading``, which may repack
    weights. Values are drawn in float32 and cast. Tensors of up to 2**18
    elements are drawn on the CPU and agree between CPU and GPU; larger ones are
    drawn on the device that holds them and **differ between CPU and GPU**.

    Args:
        model: a model that vLLM built, or a part of one. Names count from it, so
            a part gets other values than it gets inside the whole model.
        seed: any integer.

    Raises:
        ValueError: a parameter is on the meta device or has no floating-point
            type of at least 16 bits (a quantised model).
    """
    import torch

    seen: set[int] = set()
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen:  # tied weights
                    continue
                seen.add(id(parameter))
                full_name = f"{prefix}.{name}" if prefix else name
                _check_parameter(full_name, parameter)
                _fill_parameter(module, name, full_name, parameter, seed)
            for name, buffer in module.named_buffers(recurse=False):
                full_name = f"{prefix}.{name}" if prefix else name
                _fill_buffer(name, full_name, buffer, seed)


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    import torch

    if parameter.device.type == "meta":
        raise ValueError(
            f"parameter {name} is on the meta device, as online quantisation "
            "leaves it; random weights need an unquantised model."
        )
    if not parameter.is_floating_point() or torch.finfo(parameter.dtype).bits < 16:
        raise ValueError(
            f"parameter {name} has dtype {parameter.dtype}; random weights need an "
            "unquantised model."
        )


def _fill_parameter(
    module: nn.Module, name: str, full_name: str, parameter: torch.Tensor, seed: int
) -> None:
    pieces = list(_linear_pieces(module, parameter)) or list(
        _expert_pieces(module, name, parameter)
    )
    if not pieces:
        _fill_plain(module, name, full_name, parameter, seed)
        return
    for piece in pieces:
        draw = _distribution(module, name, piece.shape)
        key = f"{full_name}#{piece.suffix}"
        piece.load(_values(piece.shape, draw, key, seed, parameter.device))


def _linear_pieces(module: nn.Module, parameter: torch.Tensor) -> Iterator[_Piece]:
    """The checkpoint tensors of one parameter of a vLLM linear or embedding.

    Nothing is yielded for other modules, nor where a model has replaced the
    layer's own ``weight_loader`` by one with its own idea of the full shape.
    """
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
    )

    loader = getattr(parameter, "weight_loader", None)
    if getattr(loader, "__self__", None) is not module:
        return
    assert loader is not None

    def piece(suffix: str, dim: int, size: int, *shard_id: str | int) -> _Piece:
        shape = list(parameter.shape)
        shape[dim] = size
        return _Piece(
            suffix, tuple(shape), lambda full: loader(parameter, full, *shard_id)
        )

    if isinstance(module, QKVParallelLinear):
        key_heads = module.total_num_kv_heads
        rows = {
            "q": module.total_num_heads * module.head_size,
            "k": key_heads * module.head_size,
            "v": key_heads * getattr(module, "v_head_size", module.head_size),
        }
        for part, size in rows.items():
            yield piece(part, 0, size, part)
    elif isinstance(module, MergedColumnParallelLinear):
        for index, size in enumerate(module.output_sizes):
            yield piece(str(index), 0, size, index)
    elif isinstance(module, ColumnParallelLinear):
        yield piece("", 0, parameter.shape[0] * module.tp_size)
    elif isinstance(module, RowParallelLinear) and parameter.dim() == 2:
        yield piece("", 1, parameter.shape[1] * module.tp_size)
    elif isinstance(module, VocabParallelEmbedding):
        yield piece("", 0, module.org_vocab_size)


def _expert_pieces(
    module: nn.Module, name: str, parameter: torch.Tensor
) -> Iterator[_Piece]:
    """The checkpoint tensors of one parameter of vLLM's fused experts."""
    moe = getattr(module, "moe_config", None)
    loader = getattr(parameter, "weight_loader", None)
    if moe is None or loader is None or not name.startswith(("w13_", "w2_")):
        return
    parameter.data.zero_()  # backends may pad the sizes
    tp_size = moe.moe_parallel_config.tp_size
    hidden = getattr(moe, "hidden_dim_unpadded", None) or moe.hidden_dim
    inner = tp_size * (
        getattr(moe, "intermediate_size_per_partition_unpadded", None)
        or moe.intermediate_size_per_partition
    )
    if name.startswith("w2_"):
        shards = {"w2": (hidden, inner)}
    else:
        gated = getattr(moe, "is_act_and_mul", True)
        shards = dict.fromkeys(("w1", "w3")[: 1 + gated], (inner, hidden))
    for expert in range(moe.num_experts):
        for shard_id, shape in shards.items():

            def load(
                full: torch.Tensor, expert: int = expert, shard_id: str = shard_id
            ) -> None:
                loader(parameter, full, name, shard_id, expert)

            full_shape = shape[:1] if name.endswith("bias") else shape
            yield _Piece(f"{expert}.{shard_id}", full_shape, load)


def _fill_plain(
    module: nn.Module, name: str, full_name: str, parameter: torch.Tensor, seed: int
) -> None:
    """Fill a parameter of which only its own shape and its loader are known.

    With more than one rank, a loader of unknown kind may cut a shard out of a
    larger tensor. It is offered tensors that are larger in one dimension first:
    one that does not shard refuses them, on every rank alike.
    """
    loader = getattr(parameter, "weight_loader", None)
    ranks = _tensor_parallel_size() if loader is not None else 1
    shape = tuple(parameter.shape)
    candidates = [
        (*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :])
        for dim in range(len(shape) if ranks > 1 else 0)
    ]
    for full_shape in candidates:
        draw = _distribution(module, name, full_shape)
        try:
            loader(  # type: ignore[misc]
                parameter, _values(full_shape, draw, full_name, seed, parameter.device)
            )
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError):
            continue
        return
    draw = _distribution(module, name, shape)
    parameter.copy_(_values(shape, draw, full_name, seed, parameter.device))


def _fill_buffer(name: str, full_name: str, buffer: torch.Tensor, seed: int) -> None:
    """Fill the buffers that a checkpoint holds; tables keep what they hold."""
    shape = tuple(buffer.shape)
    if name in _OFFSET_BUFFERS:
        draw = _Draw(0.0, 0.02)
    elif name in _SCALE_BUFFERS:
        draw = _Draw(1.0, 0.1)
    else:
        return
    buffer.copy_(_values(shape, draw, full_name, seed, buffer.device))


def _tensor_parallel_size() -> int:
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 1
    return parallel_state.get_tensor_model_parallel_world_size()


def _distribution(module: nn.Module, name: str, shape: tuple[int, ...]) -> _Draw:
    """The distribution of a full tensor of this shape, by its role."""
    kind = type(module).__name__
    if name == "dt_bias":  # a linear attention that remembers about 50 tokens
        return _Draw(-4.0, 0.5)
    if name.endswith("bias"):
        return _Draw(0.0, 0.02)
    if kind in _ZERO_CENTRED_NORMS:
        return _Draw(0.0, 0.1)
    if "norm" in kind.lower() or name in _SCALE_NAMES or not shape:
        return _Draw(1.0, 0.1)
    if name == "A_log":
        return _Draw(0.0, 0.5)
    # Only a convolution's kernel sums over all trailing dimensions; a table of
    # positions [1, rows, width] or of experts [n, out, in] ends in its fan-in.
    fan_in = math.prod(shape[1:]) if "Conv" in kind and len(shape) > 2 else shape[-1]
    return _Draw(0.0, 1.0 / math.sqrt(fan_in))


def _values(
    shape: tuple[int, ...], draw: _Draw, key: str, seed: int, device: torch.device
) -> torch.Tensor:
    """Draw a float32 tensor that depends on ``seed`` and ``key`` alone."""
    import torch

    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    on_cpu = math.prod(shape) <= _CPU_DRAW_ELEMENTS
    generator = torch.Generator(device="cpu" if on_cpu else device)
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    values = torch.empty(shape, dtype=torch.float32, device=generator.device)
    values.normal_(draw.mean, draw.std, generator=generator)
    return values.to(device)
