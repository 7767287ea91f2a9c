# SPDX-License-Identifier: Apache-2.0
"""The compatibility matrix: what ``vllm-encoder-cg models`` and the docs show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_encoder_cg.models.catalog import ADAPTED, SupportedModel, native_models
from vllm_encoder_cg.models.registry import has_fused_forward
from vllm_encoder_cg.models.verified import Verified, read_verified

ADAPTER, PROTOCOL = "adapter", "vLLM's protocol"


@dataclass(frozen=True)
class MatrixRow:
    """One model class."""

    architecture: str
    driven_by: str
    image: bool | None
    """By graph; None: as the model declares."""
    video: bool | None
    paths: tuple[str, ...]
    """Sub-forwards with graphs of their own."""
    axis: str | None
    """What there is a graph per, beside the token budget."""
    backends: tuple[str, ...]
    """Attention backends that are captured; empty: whichever the tower uses."""
    fused: bool
    """Whether there is a forward in fewer kernels to capture."""
    verified: tuple[Verified, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {
            "verified": [entry.model_dump(mode="json") for entry in self.verified]
        }


def matrix_rows() -> list[MatrixRow]:
    """Models with an adapter, by name, then those of the installed vLLM that
    implement its protocol themselves."""
    verified = read_verified()

    def of(architecture: str) -> tuple[Verified, ...]:
        return tuple(v for v in verified if v.architecture == architecture)

    adapted = [_adapted_row(model, of(model.architecture)) for model in ADAPTED]
    native = [
        MatrixRow(name, PROTOCOL, None, None, (), None, (), False, of(name))
        for name in native_models()
    ]
    return adapted + native


def _adapted_row(model: SupportedModel, verified: tuple[Verified, ...]) -> MatrixRow:
    return MatrixRow(
        architecture=model.architecture,
        driven_by=ADAPTER,
        image="image" in model.modalities,
        video="video" in model.modalities,
        paths=model.paths,
        axis=model.axis,
        backends=model.backends,
        fused=has_fused_forward(model.architecture),
        verified=verified,
    )


def devices(rows: Sequence[MatrixRow]) -> list[str]:
    """Those on which anything was verified, the CPU last."""
    names = {entry.device for row in rows for entry in row.verified}
    return sorted(names, key=lambda name: (name == "CPU", name))


def verified_on(row: MatrixRow, device: str) -> str:
    """Versions, backends and day; ``"unknown"`` where nothing was verified."""
    entries = [entry for entry in row.verified if entry.device == device]
    return "; ".join(map(describe, entries)) or "unknown"


def describe(entry: Verified) -> str:
    """One entry on one line, without model and device."""
    error = f"{entry.worst_error:.0e}" if entry.worst_error else "equal"
    small = ", small tower" if entry.tower == "small" else ""
    return (
        f"vLLM {entry.vllm}, {', '.join(entry.backends)}: {entry.dtype} {error}{small} "
        f"({entry.date})"
    )
