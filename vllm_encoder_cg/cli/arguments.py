# SPDX-License-Identifier: Apache-2.0
"""What may be given: a checkpoint that is there, and items that it encodes by graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_encoder_cg.models.catalog import ADAPTED
from vllm_encoder_cg.verification_cases import MediaBatch


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
