# SPDX-License-Identifier: Apache-2.0
"""What may be given: a checkpoint that is there, and items that it encodes by graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from vllm_encoder_cg.models.catalog import ADAPTED
from vllm_encoder_cg.samples.architectures import ARCHITECTURES
from vllm_encoder_cg.verification_cases import MediaBatch

Model = Annotated[
    str | None, Option(help="Checkpoint: a name or folder, as vLLM takes it.")
]
Backend = Annotated[
    str | None,
    Option(
        help="Encoder attention backend: FLASH_ATTN, FLASHINFER or TRITON_ATTN. "
        "Default: vLLM's choice."
    ),
]
RandomWeights = Annotated[
    bool, Option("--random-weights", help="Do not read the checkpoint's weights.")
]
Dtype = Annotated[
    str | None,
    Option(help="Default: float32 on a CPU, otherwise what vLLM chooses."),
]
MaxTokens = Annotated[
    int | None,
    Option(
        help="Largest automatic budget. Default: 16384; a small sample: 1024.", min=1
    ),
]
TrustRemoteCode = Annotated[
    bool, Option("--trust-remote-code", help="Run code that the checkpoint brings.")
]
Verbose = Annotated[bool, Option("--verbose", help="Show what vLLM logs.")]


def check_sample(architecture: str | None) -> None:
    """Whether there is a sample checkpoint of an architecture.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    if architecture is not None and architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture: there is no sample of {architecture!r}; there are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )


def check_folder(model: str | None) -> None:
    """Refuses the path of a checkpoint that is not there; a mere name is one of a
    checkpoint to fetch, and None is none.

    Raises:
        ValueError: there is no such folder.
    """
    if model is None or Path(model).exists():
        return
    if model.startswith(("/", "./", "../", "~")):
        raise ValueError(
            f"model: there is no folder {model}; give one with a checkpoint, or a "
            "name to fetch"
        )


def check_catalog(architecture: str | None, batches: Iterable[MediaBatch]) -> None:
    """``check_modalities`` by the catalog, before a model is built.

    Args:
        architecture: one that the catalog lacks is not judged.

    Raises:
        ValueError: see there.
    """
    for model in ADAPTED:
        if model.architecture == architecture:
            check_modalities(architecture, model.modalities, batches)


def check_modalities(
    architecture: str, modalities: Sequence[str], batches: Iterable[MediaBatch]
) -> None:
    """Refuses items that `architecture` does not encode by graph.

    Raises:
        ValueError: one is of none of `modalities`; the message says which may be.
    """
    for batch in batches:
        if batch.modality not in modalities:
            raise ValueError(
                f"items: got {batch}, and graphs of {architecture} encode "
                f"{' and '.join(modalities)} input only"
            )
