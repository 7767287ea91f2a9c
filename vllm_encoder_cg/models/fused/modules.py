# SPDX-License-Identifier: Apache-2.0
"""vLLM's linears, norms and activations as a fused block calls them.

A linear, norm or activation that is not exactly of a class known here, or whose
forward was changed on the instance, is called as it is; of any other module a fused
tower has to know the class (``expect``).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg import kernels
from vllm_encoder_cg.kernels import reference

_LINEARS = (
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
)
HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of which the GPU makes products at full speed."""


class FusionRefusedError(ValueError):
    """A tower has no fused forward; the message says why."""


def is_exactly(module: Any, *names: str) -> bool:
    """Whether `module` is of vLLM's class of one of these names, not of a subclass or
    wrapper, with the forward of that class."""
    kind = type(module)
    return (
        kind.__name__ in names
        and kind.__module__.partition(".")[0] == "vllm"
        and not is_changed(module)
    )


def is_changed(module: Any) -> bool:
    """Whether it is a ``torch.nn.Module`` that has forward hooks, or a forward of its
    own in place of its class's."""
    return isinstance(module, torch.nn.Module) and bool(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    )


def expect(module: Any, name: str) -> None:
    """Makes sure of a module whose forward is about to be replaced.

    Raises:
        FusionRefusedError: it is not exactly of vLLM's class `name`.
    """
    if not is_exactly(module, name):
        changed = " with forward hooks or another forward" if is_changed(module) else ""
        raise FusionRefusedError(
            f"it has a {type(module).__name__}{changed} where a {name} is known"
        )


def expect_unsharded(attention: Any) -> None:
    """Makes sure that a rank has all heads.

    Raises:
        FusionRefusedError: the attention is tensor parallel.
    """
    if attention.tp_size > 1:
        raise FusionRefusedError(
            f"its {type(attention).__name__} is sharded; set --mm-encoder-tp-mode to "
            "data to have it whole on each rank"
        )


def linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """``module(x)`` of a vLLM linear, which may return its bias beside."""
    result = module(x)
    if not isinstance(result, tuple):
        return result
    output, bias = result
    return output if bias is None else output + bias


def is_plain(module: Any) -> bool:
    """Whether a linear is nothing but its weight and bias: not sharded, quantised,
    wrapped or hooked."""
    return (
        is_exactly(module, *_LINEARS)
        and type(module.quant_method).__name__ == "UnquantizedLinearMethod"
        and module.tp_size == 1
        and not module.skip_bias_add
    )


class Norm:
    """A layer norm or RMS norm, with the residual addition before it.

    Args:
        module: PyTorch's or vLLM's ``LayerNorm``, or vLLM's ``RMSNorm``; of anything
            else, the addition is made first and the module called.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._centred = is_exactly(module, "LayerNorm") or (
            type(module) is torch.nn.LayerNorm and not is_changed(module)
        )
        self._known = self._centred or (
            is_exactly(module, "RMSNorm") and module.variance_size_override is None
        )
        self._eps = (
            module.eps if self._centred else getattr(module, "variance_epsilon", 0.0)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of `x` ``[rows, width]``."""
        return self.add(x, None)[1]

    def add(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x + delta * scale`` and its norm; without `delta`, `x` and its norm.

        Args:
            x: ``[rows, width]``.
            delta: as `x`, or None.
            scale: ``[width]``, or None for 1.
        """
        module = self._module
        if not self._known:
            total = x if delta is None else add_residual(x, delta, scale)
            return total, module(total)
        if kernels.is_available(x.device):
            from vllm_encoder_cg.kernels.add_norm import add_norm
        else:
            add_norm = reference.add_norm
        weight = module.weight if self._centred or module.has_weight else None
        bias = module.bias if self._centred else None
        return add_norm(
            x, delta, weight, bias, self._eps, centred=self._centred, scale=scale
        )


def add_residual(
    x: torch.Tensor, delta: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """``x + delta * scale`` where no norm follows."""
    return x + delta if scale is None else torch.addcmul(x, delta, scale)


class Activation:
    """An activation between two products.

    Args:
        module: what vLLM's MLP calls; unknown ones are called as they are.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.kind = _activation_kind(module)
        self._gated = type(module).__name__ == "SiluAndMul"

    def after(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """The activation of a linear's output.

        Args:
            module: the linear.
            x: its input ``[rows, width]``.
        """
        fused = kernels.is_available(x.device)
        if (
            fused
            and self.kind == "gelu_tanh"
            and is_plain(module)
            and module.bias is not None
            and x.dtype in HALVES
        ):
            # GELU in the product's epilogue, which is of the tanh kind on NVIDIA.
            return torch._addmm_activation(
                module.bias, x, module.weight.t(), use_gelu=True
            )
        output = linear(module, x)
        if self.kind is None:
            return self._module(output)
        if fused:
            from vllm_encoder_cg.kernels.activate import activate
        else:
            activate = reference.activate
        return activate(output, self.kind, gated=self._gated)


def _activation_kind(module: Any) -> str | None:
    """Its name in ``kernels.reference.ACTIVATIONS``; None: unknown."""
    if is_changed(module):
        return None
    if type(module) is torch.nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if type(module).__module__.partition(".")[0] not in ("transformers", "vllm"):
        return None
    return {
        "GELUTanh": "gelu_tanh",
        "PytorchGELUTanh": "gelu_tanh",
        "QuickGELU": "quick_gelu",
        "SiluAndMul": "silu",
    }.get(type(module).__name__)
