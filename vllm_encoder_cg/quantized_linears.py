# SPDX-License-Identifier: Apache-2.0
"""How the linears of a quantised encoder treat their input.

vLLM's quantisation methods and schemes say by a ``QuantKey`` to what their input is
rounded, and how many values share a scale.  Some that only quantise weights have one
as well, and some that quantise their input have none: their names, or those of their
kernels, tell.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

_WEIGHTS_ONLY = re.compile(r"A16|Marlin")
_NARROW_INPUT = re.compile(r"A[48]|FP[48]|Fp[48]|Int8")
"""As in ``CompressedTensorsW8A8Int8`` and ``ModelOptFp8LinearMethod``."""

COARSENESS = 2.0
"""How many times as far two runs may differ where linears round their input.  A last
bit of float8_e4m3 is 16 times one of bfloat16, but only where a value lies near the
middle of two does a small difference move it: Qwen3-VL's tower in float8 differs from
itself by 5.1e-2 when pixels change in their last bit, and by 2e-2 in bfloat16."""


def quantization_refusal(model: Any) -> str | None:
    """What rules out capturing the encoder of `model`, with the remedy: a linear that
    scales by the largest value of all rows together would let padding, and what an
    earlier batch left in it, reach real rows."""
    if any(
        key is not None
        and not key.scale.static
        and key.scale.group_shape.is_per_tensor()
        for key in _input_keys(model)
    ):
        return (
            "its quantised linears scale their input by the largest value of all rows, "
            "padding included; quantise the input per token or with static scales, or "
            "leave the vision tower unquantised, to use graphs"
        )
    return None


def rounds_input(model: Any) -> bool:
    """Whether some linear of the encoder of `model` rounds its input to fewer bits than
    the model's dtype."""
    return any(True for _ in _input_keys(model))


def _input_keys(model: Any) -> Iterator[Any]:
    """Of all linears that quantise their input; None for one that does not say how."""
    for module in _encoder_modules(model):
        for holder in (
            getattr(module, "quant_method", None),
            getattr(module, "scheme", None),
        ):
            name = type(holder).__name__
            kernels = (getattr(holder, at, None) for at in ("fp8_linear", "kernel"))
            names = (name, *(type(kernel).__name__ for kernel in kernels))
            if any(map(_WEIGHTS_ONLY.search, names)):
                continue
            key = getattr(holder, "activation_quant_key", None)
            if key is not None or _NARROW_INPUT.search(name):
                yield key


def _encoder_modules(model: Any) -> Iterator[Any]:
    """All but the language model: the towers and what connects them."""
    if not hasattr(model, "modules"):
        return
    language: set[int] = set()
    with contextlib.suppress(Exception):  # where it cannot be told, all are looked at
        language = {id(module) for module in model.get_language_model().modules()}
    yield from (module for module in model.modules() if id(module) not in language)
