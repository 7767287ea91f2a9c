# SPDX-License-Identifier: Apache-2.0
"""Captured tensors: one allocation per path and name, graphs read slices of it.

Graphs of one path never run at the same time, so budgets and capture axes share
storage: a buffer of fewer elements starts at the same address.  Capture the
largest graph first, then no allocation is outgrown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import torch

from vllm_encoder_cg.adapter import BufferSpec

K = TypeVar("K", tuple[str, str, torch.dtype], tuple[str, torch.dtype])


class BufferArena:
    """Owns the input and output storage of a manager's graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._inputs: dict[tuple[str, str, torch.dtype], torch.Tensor] = {}
        self._outputs: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._outgrown: list[tuple[str, torch.Tensor]] = []

    def inputs(
        self, path: str, specs: Mapping[str, BufferSpec]
    ) -> dict[str, torch.Tensor]:
        """Tensors for `specs`, sharing storage with earlier calls for `path`."""
        return {
            name: self._slice(
                self._inputs, (path, name, spec.dtype), spec.shape, spec.dtype
            )
            for name, spec in specs.items()
        }

    def output(
        self, path: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """An output tensor, sharing storage with earlier calls for `path`: each
        output is copied out before the next replay is launched."""
        return self._slice(self._outputs, (path, dtype), shape, dtype)

    def release(self, path: str) -> None:
        """Gives back the storage of a path that has no graph."""
        self._inputs = {k: v for k, v in self._inputs.items() if k[0] != path}
        self._outputs = {k: v for k, v in self._outputs.items() if k[0] != path}
        self._outgrown = [kept for kept in self._outgrown if kept[0] != path]

    def _slice(
        self,
        storages: dict[K, torch.Tensor],
        key: K,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        numel = math.prod(shape)
        storage = storages.get(key)
        if storage is None or storage.numel() < numel:
            if storage is not None:
                # A captured graph still holds its address.
                self._outgrown.append((key[0], storage))
            storage = torch.zeros(numel, dtype=dtype, device=self.device)
            storages[key] = storage
        return storage[:numel].view(shape)

    @torch.inference_mode()
    def poison(self) -> None:
        """Fills every floating-point input with NaN and every uint8 input with
        255, to show that nothing of an earlier replay is read."""
        for (_, _, dtype), storage in self._inputs.items():
            if dtype.is_floating_point or dtype.is_complex:
                storage.fill_(float("nan"))
            elif dtype == torch.uint8:
                storage.fill_(255)
        for storage in self._outputs.values():
            storage.fill_(float("nan"))

    def bytes_beside(self, buffers: Mapping[str, torch.Tensor]) -> int:
        """Bytes of `buffers` that are not slices of what is held here."""
        held = {storage.data_ptr() for storage in self._inputs.values()}
        return sum(b.nbytes for b in buffers.values() if b.data_ptr() not in held)

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(
            t.numel() * t.element_size()
            for t in (
                *self._inputs.values(),
                *self._outputs.values(),
                *(storage for _, storage in self._outgrown),
            )
        )
