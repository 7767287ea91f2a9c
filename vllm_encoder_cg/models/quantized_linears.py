# SPDX-License-Identifier: Apache-2.0
"""How the linears of a quantised tower treat their input.

vLLM's quantisation methods and schemes say by a ``QuantKey`` to what their input is
rounded, and how many values share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def scales_by_batch(tower: Any) -> bool:
    """Whether some linear scales by the largest value of all rows together, which
    are also those of other items and of padding."""
    return any(
        not key.scale.static and key.scale.group_shape.is_per_tensor()
        for key in _input_keys(tower)
    )


def rounds_input(tower: Any) -> bool:
    """Whether some linear rounds its input to fewer bits than the tower's dtype."""
    return any(True for _ in _input_keys(tower))


def _input_keys(tower: Any) -> Iterator[Any]:
    """Of all linears that quantise their input."""
    for module in tower.modules():
        for holder in (
            getattr(module, "quant_method", None),
            getattr(module, "scheme", None),
        ):
            key = getattr(holder, "activation_quant_key", None)
            if key is not None:
                yield key
