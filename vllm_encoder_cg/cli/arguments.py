# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, and what may be given in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from vllm_encoder_cg.models.catalog import ADAPTED
from vllm_encoder_cg.samples.architectures import ARCHITECTURES
from vllm_encoder_cg.verification_cases import MediaBatch

if TYPE_CHECKING:
    from vllm_encoder_cg.manager import EncoderCudaGraphManager

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


def check_encoder(model: str | None, architecture: str | None) -> None:
    """Refuses anything but one checkpoint, or one architecture that has a sample.

    Args:
        model: a folder that has to be there, or the name of a checkpoint to fetch.

    Raises:
        ValueError: the message says what may be given.
    """
    if (model is None) == (architecture is None):
        raise ValueError(
            "give either --model CHECKPOINT, or --architecture NAME for a sample with "
            "random weights (names: vllm-encoder-cg models)"
        )
    if architecture is not None and architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture: there is no sample of {architecture!r}; there are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    is_path = model is not None and model.startswith(("/", "./", "../", "~"))
    if model is not None and is_path and not Path(model).exists():
        raise ValueError(
            f"model: there is no folder {model}; give one with a checkpoint, or a "
            "name to fetch"
        )


def check_items(architecture: str | None, batches: Iterable[MediaBatch]) -> None:
    """Refuses items that a model does not encode by graph, before it is built.

    Args:
        architecture: one that the catalog lacks is not judged.

    Raises:
        ValueError: one is of another modality; the message says which may be.
    """
    for model in ADAPTED:
        if model.architecture == architecture:
            _check_modalities(architecture, model.modalities, batches)


def check_items_of(
    manager: EncoderCudaGraphManager, batches: Iterable[MediaBatch]
) -> None:
    """Likewise, by what the built model says.

    Raises:
        ValueError: see there.
    """
    name = type(manager.model).__name__
    _check_modalities(name, manager.config.modalities, batches)


def _check_modalities(
    architecture: str, modalities: Sequence[str], batches: Iterable[MediaBatch]
) -> None:
    for batch in batches:
        if batch.modality not in modalities:
            raise ValueError(
                f"items: got {batch}, and graphs of {architecture} encode "
                f"{' and '.join(modalities)} input only"
            )
