# SPDX-License-Identifier: Apache-2.0
"""What was verified where: ``verified.json``, one entry per model and machine.

An entry is added from the results of ``benchmarks/gpu_check.py`` by
``benchmarks/record_verified.py``, or by hand.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter

FILE = Path(__file__).parent / "verified.json"


class Verified(BaseModel):
    """One model class on one kind of machine, with one version of vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    device: str
    """Name of the GPU, or ``"CPU"``."""
    vllm: str
    """Version."""
    dtype: str
    backends: tuple[str, ...]
    """Attention backends of the encoder, each verified."""
    date: datetime.date
    tower: str
    """Configuration: ``"released"`` or ``"small"``; weights are random."""
    cases: NonNegativeInt
    """Compared with eager, in every backend; each may have many batches."""
    worst_error: Annotated[float, Field(ge=0)]
    """Relative norm of the difference from eager, of the worst item."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What there is one entry for."""
        return self.architecture, self.device, self.vllm, self.dtype


_ENTRIES = TypeAdapter(tuple[Verified, ...])


def read_verified(file: Path = FILE) -> tuple[Verified, ...]:
    """All entries.

    Raises:
        pydantic.ValidationError: the file is not what it should be.
    """
    return _ENTRIES.validate_json(file.read_bytes())


def write_verified(entries: tuple[Verified, ...], file: Path = FILE) -> None:
    """Writes entries in order."""
    ordered = tuple(sorted(entries, key=lambda entry: entry.key))
    file.write_bytes(_ENTRIES.dump_json(ordered, indent=2) + b"\n")


def merge(
    entries: tuple[Verified, ...], new: tuple[Verified, ...]
) -> tuple[Verified, ...]:
    """`entries` with `new` in place of those of the same key; where both are of one
    day, their backends are joined."""
    merged = {entry.key: entry for entry in entries}
    for entry in new:
        known = merged.get(entry.key)
        if known is not None and known.date == entry.date:
            entry = entry.model_copy(
                update={
                    "backends": tuple(sorted({*known.backends, *entry.backends})),
                    "cases": min(known.cases, entry.cases),
                    "worst_error": max(known.worst_error, entry.worst_error),
                }
            )
        merged[entry.key] = entry
    return tuple(merged.values())
