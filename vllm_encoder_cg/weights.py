# SPDX-License-Identifier: Apache-2.0
"""Notices when a model no longer uses the weights that its graphs read.

A graph holds addresses.  Values written to a parameter are seen by the next replay;
a parameter that is replaced is not: replays would go on with the one before.  vLLM
itself writes into parameters (reloading, weight transfer, waking up); what else has
access to a model in this process need not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_AT_ONCE = 16
"""Weights compared per batch, which takes about 5 microseconds."""


@dataclass(frozen=True)
class _Place:
    """Where a module keeps a weight, or a submodule."""

    names: dict[str, Any]
    """The module's own table."""
    key: str
    name: str
    """In full, for messages."""
    tensor: torch.Tensor | None = None
    """What was there.  Kept alive: as long as there are graphs, they read memory
    that belongs to it."""
    module: weakref.ref[torch.nn.Module] | None = None
    address: int = field(default=0)

    def has_changed(self) -> bool:
        """Whether another weight or submodule is there now."""
        found = self.names.get(self.key)
        if self.module is not None:
            return self.module() is not found
        try:
            return found is None or found.data_ptr() != self.address
        except (AttributeError, RuntimeError):  # another kind of thing altogether
            return True


class WeightWatch:
    """Remembers where the weights of a model's encoder are.

    Those of its language model are left out, as are buffers that are no part of
    a checkpoint: tables of positions, which some models replace by larger ones.

    Args:
        model: the model; nothing is watched unless it is a ``torch.nn.Module``.
    """

    def __init__(self, model: Any) -> None:
        self._places: list[_Place] = []
        if isinstance(model, torch.nn.Module):
            self._places = list(_find_places(model, _language_model(model)))
        self._next = 0

    def __len__(self) -> int:
        return len(self._places)

    def find_replaced(self) -> str | None:
        """The name of a weight that was replaced since; None: all are there."""
        return _first_changed(self._places)

    def glance(self) -> str | None:
        """As ``find_replaced``, but looks at the next few weights only; all have
        been looked at after a few dozen calls."""
        if self._next >= len(self._places):
            self._next = 0
        begin = self._next
        self._next += _AT_ONCE
        return _first_changed(self._places[begin : self._next])


def _first_changed(places: Sequence[_Place]) -> str | None:
    for place in places:
        if place.has_changed():
            return place.name
    return None


def _language_model(model: torch.nn.Module) -> Any:
    try:
        return model.get_language_model()
    except Exception:  # not every model can tell, or has one
        return None


def _find_places(
    module: torch.nn.Module, left_out: Any, prefix: str = ""
) -> Iterator[_Place]:
    not_saved = module._non_persistent_buffers_set
    for names in (module._parameters, module._buffers):
        for key, tensor in names.items():
            if tensor is None or key in not_saved:
                continue
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # a tensor without storage
                continue
            kept = tensor.detach()
            yield _Place(names, key, prefix + key, tensor=kept, address=address)
    for key, child in module._modules.items():
        if child is None or child is left_out:
            continue
        yield _Place(module._modules, key, prefix + key, module=weakref.ref(child))
        yield from _find_places(child, left_out, f"{prefix}{key}.")
