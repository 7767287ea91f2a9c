# SPDX-License-Identifier: Apache-2.0
"""Costs from a file where there is one of this encoder, else measured and saved."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, TypeAlias

import torch

from vllm_encoder_cg import __version__
from vllm_encoder_cg.cost_file import (
    CostFile,
    CostFileError,
    MeasuredEncoder,
    read_costs,
    write_costs,
)
from vllm_encoder_cg.costs import MeasuredCosts
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.measurement import measure_encoder
from vllm_encoder_cg.ranks import EncoderRanks
from vllm_encoder_cg.sharding import PathRate

if TYPE_CHECKING:
    from vllm_encoder_cg.adapter import EncoderAdapter
    from vllm_encoder_cg.capture import GraphSet

logger = init_logger(__name__)

Measured: TypeAlias = tuple[MeasuredCosts | None, dict[str, PathRate] | None]


def identify(
    adapter: EncoderAdapter, device: torch.device, ranks: EncoderRanks, forward: str
) -> MeasuredEncoder:
    """What times of this encoder depend on."""
    import vllm

    config = adapter.vllm_config
    hf_config = config.model_config.hf_config
    vision = getattr(hf_config, "vision_config", None) or hf_config
    if hasattr(vision, "to_dict"):
        vision = vision.to_dict()
    text = json.dumps(vision, sort_keys=True, default=str)
    return MeasuredEncoder(
        architecture=type(adapter.model).__name__,
        encoder=hashlib.sha256(text.encode()).hexdigest()[:16],
        dtype=str(config.model_config.dtype),
        backend=adapter.backend_name(),
        device=(
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        ),
        ranks=ranks.size,
        mode=ranks.mode.value,
        forward=forward,
        vllm=vllm.__version__,
        package=__version__,
    )


def load_or_measure(
    path: str | None,
    adapter: EncoderAdapter,
    graphs: GraphSet,
    ranks: EncoderRanks,
    forward: str,
) -> Measured:
    """The costs in the file at `path` where it is of this encoder; otherwise
    ``measure_encoder``, whose result is saved there if there was no file.

    The first rank reads and writes; all call it together.  A file that cannot be
    used, or written, is named in one warning and changes nothing else; it is not
    overwritten, as it may be another server's.

    Args:
        path: None: always measured.
        forward: the setting that chooses the captured forward.
    """
    if path is None:
        return measure_encoder(adapter, graphs, ranks)
    encoder = identify(adapter, graphs.arena.device, ranks, forward)
    exists, loaded = False, None
    if ranks.rank == 0:
        exists, loaded = _load(path, encoder)
    loaded = ranks.from_first(loaded)
    if loaded is not None:
        return loaded
    costs, rates = measure_encoder(adapter, graphs, ranks)
    if ranks.rank == 0 and costs is not None and graphs.graphs and not exists:
        _save(path, encoder, costs, rates, graphs)
    return costs, rates


def _load(path: str, encoder: MeasuredEncoder) -> tuple[bool, Measured | None]:
    """Whether there is a file, and what it holds of `encoder`."""
    try:
        content = read_costs(path)
        differences = content.differences(encoder)
        if differences:
            raise CostFileError(
                f"{path}: its times are of {differences[0]}; name another file for "
                "this server"
            )
        costs = content.costs(), content.path_rates()
    except FileNotFoundError:
        return False, None
    except CostFileError as error:
        logger.warning("Encoder costs are measured, not read: %s", error)
        return True, None
    logger.info("Encoder costs are read from %s", path)
    return True, costs


def _save(
    path: str,
    encoder: MeasuredEncoder,
    costs: MeasuredCosts,
    rates: dict[str, PathRate] | None,
    graphs: GraphSet,
) -> None:
    content = CostFile.of(
        encoder,
        costs,
        rates,
        graphs=len(graphs.graphs),
        largest_budget=max(key.token_budget for key in graphs.graphs),
        memory_bytes=graphs.memory_bytes,
    )
    try:
        write_costs(path, content)
    except OSError as error:
        logger.warning(
            "Encoder costs cannot be written to %s: %s; name a file in a folder that "
            "exists and can be written to",
            path,
            error.strerror or error,
        )
        return
    logger.info("Encoder costs are written to %s", path)
