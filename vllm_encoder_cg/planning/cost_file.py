# SPDX-License-Identifier: Apache-2.0
"""Measured costs in a file: for a restart that need not measure, and for ``plan``.

A file is of one encoder on one kind of GPU.  It is written whole or not at all,
and one that does not read as written is refused with a reason.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
)

from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.planning.costs import MeasuredCosts
from vllm_encoder_cg.planning.sharding import PathRate

FORMAT: Literal["vllm-encoder-cg-costs"] = "vllm-encoder-cg-costs"
VERSION: Literal[1] = 1

_Ms = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CostFileError(ValueError):
    """A cost file cannot be used; the message names the file and the reason."""


def _hashable(value: Any) -> Hashable:
    """JSON has lists where keys are tuples."""
    if isinstance(value, dict):
        raise ValueError("an axis key is no object")
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MeasuredEncoder(_Part):
    """What times depend on; a file of anything else is of no use."""

    architecture: str
    encoder: str
    """Digest of the vision configuration."""
    dtype: str
    backend: str
    """Attention backend of the encoder."""
    device: str
    """Name of the GPU."""
    ranks: PositiveInt
    """Tensor-parallel size."""
    mode: str
    """``mm_encoder_tp_mode``."""
    forward: str
    """The setting that chooses the captured forward."""
    vllm: str
    package: str
    """Versions."""


class ReplayTime(_Part):
    """One replay of one graph."""

    path: str
    token_budget: PositiveInt
    axis_keys: Annotated[tuple[Any, ...], AfterValidator(_hashable)] = ()
    ms: _Ms


class EagerTime(_Part):
    """One eager forward of one path."""

    path: str
    tokens: PositiveInt
    ms: _Ms


class PathRates(_Part):
    """``PathRate`` of one path."""

    path: str
    token_ms: _Rate
    attention_ms: _Rate


class CostFile(_Part):
    """Everything that was measured at a start-up."""

    format: Literal["vllm-encoder-cg-costs"] = FORMAT
    version: Literal[1] = VERSION
    measured: MeasuredEncoder
    fused: bool
    """Whether the fused forward was captured."""
    graphs: PositiveInt
    """How many there were."""
    largest_budget: PositiveInt
    memory_bytes: Annotated[int, Field(ge=0)]
    """That they took."""
    replays: tuple[ReplayTime, ...]
    eager: tuple[EagerTime, ...]
    rates: tuple[PathRates, ...] = ()
    """Only where encoders are data parallel."""

    @classmethod
    def of(
        cls,
        measured: MeasuredEncoder,
        costs: MeasuredCosts,
        rates: dict[str, PathRate] | None,
        *,
        fused: bool,
        graphs: int,
        largest_budget: int,
        memory_bytes: int,
    ) -> CostFile:
        """From what was measured."""
        return cls(
            measured=measured,
            fused=fused,
            graphs=graphs,
            largest_budget=largest_budget,
            memory_bytes=memory_bytes,
            replays=tuple(
                ReplayTime(
                    path=key.path,
                    token_budget=key.token_budget,
                    axis_keys=key.axis_keys,
                    ms=ms,
                )
                for key, ms in costs.replay_ms.items()
            ),
            eager=tuple(
                EagerTime(path=path, tokens=tokens, ms=ms)
                for path, times in costs.eager_ms.items()
                for tokens, ms in times.items()
            ),
            rates=tuple(
                PathRates(
                    path=path,
                    token_ms=rate.token_ms,
                    attention_ms=rate.attention_ms,
                )
                for path, rate in (rates or {}).items()
            ),
        )

    def costs(self) -> MeasuredCosts:
        """What plans are priced by."""
        eager: dict[str, dict[int, float]] = {}
        for time in self.eager:
            eager.setdefault(time.path, {})[time.tokens] = time.ms
        return MeasuredCosts(
            {GraphKey(t.path, t.token_budget, t.axis_keys): t.ms for t in self.replays},
            eager,
        )

    def path_rates(self) -> dict[str, PathRate] | None:
        """What items are shared over ranks by."""
        rates = {r.path: PathRate(r.token_ms, r.attention_ms) for r in self.rates}
        return rates or None

    def differences(self, other: MeasuredEncoder) -> list[str]:
        """What the times are of, where `other` is something else."""
        theirs = other.model_dump()
        return [
            f"{name} {value!r}, and this is {theirs[name]!r}"
            for name, value in self.measured.model_dump().items()
            if value != theirs[name]
        ]


def read_costs(path: str | os.PathLike[str]) -> CostFile:
    """Reads a cost file.

    Raises:
        FileNotFoundError: there is none.
        CostFileError: it cannot be read, is damaged, or is of another version of
            the format.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # of a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise CostFileError(f"{path}: cannot be read: {reason}") from None
    try:
        return CostFile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CostFileError(
            f"{path}: no cost file of this version, or damaged "
            f"({f'{where}: ' if where else ''}{first['msg']}); delete it to have it "
            "written anew"
        ) from None


def write_costs(path: str | os.PathLike[str], content: CostFile) -> None:
    """Writes a cost file; a reader sees the old file or the new one, whole.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(
        prefix=f".{path.name}.", dir=path.parent or None
    )
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's files are for this user alone.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
