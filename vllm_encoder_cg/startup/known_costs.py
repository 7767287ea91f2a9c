# SPDX-License-Identifier: Apache-2.0
"""Costs from a file where there is one of this encoder, else measured and saved."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, TypeAlias

import torch

from vllm_encoder_cg import __version__
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.planning.cost_file import (
    CostFile,
    CostFileError,
    MeasuredEncoder,
    read_costs,
    write_costs,
)
from vllm_encoder_cg.planning.costs import MeasuredCosts
from vllm_encoder_cg.planning.sharding import PathRate
from vllm_encoder_cg.ranks import EncoderRanks
from vllm_encoder_cg.settings import EncoderCgSettings
from vllm_encoder_cg.startup.measurement import measure_encoder

if TYPE_CHECKING:
    from vllm_encoder_cg.adapter import EncoderAdapter
    from vllm_encoder_cg.graph_set import GraphSet

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


def usable_cost_file(settings: EncoderCgSettings, device: torch.device) -> str | None:
    """The cost file; None, with a line that says why, where nothing is measured."""
    if settings.cost_file is None:
        return None
    if device.type == "cuda" and settings.cost_model:
        return settings.cost_file
    logger.info(
        "The encoder cost file %s is neither read nor written: nothing is measured %s",
        settings.cost_file,
        "on a CPU" if settings.cost_model else "as cost_model is false",
    )
    return None


class KnownCosts:
    """The cost file of one start-up.

    The first rank reads and writes; all ranks make and call it together.  A file
    that cannot be used, or written, is named in one warning and changes nothing else;
    it is not overwritten, as it may be another server's.

    Args:
        path: None: everything is measured, and nothing saved.
        setting: the one that chooses the captured forward.
    """

    def __init__(
        self,
        path: str | None,
        adapter: EncoderAdapter,
        device: torch.device,
        ranks: EncoderRanks,
        setting: str,
    ) -> None:
        self._path = path
        self._adapter = adapter
        self._ranks = ranks
        self._setting = setting
        self._exists = False
        self._content: CostFile | None = None
        if path is None:
            return
        self._encoder = identify(adapter, device, ranks, setting)
        if ranks.rank == 0:
            self._exists, self._content = _load(path, self._encoder)
        self._content = ranks.from_first(self._content)

    @property
    def forward_setting(self) -> str:
        """The setting, with what ``"auto"`` came to when the file was written."""
        if self._content is None or self._setting != "auto":
            return self._setting
        return "on" if self._content.fused else "off"

    def load_or_measure(self, graphs: GraphSet) -> Measured:
        """What the file has; otherwise ``measure_encoder``, whose result is saved if
        there was no file."""
        if self._content is not None and self._content.fused == self._adapter.fused:
            return self._content.costs(), self._content.path_rates()
        costs, rates = measure_encoder(self._adapter, graphs, self._ranks)
        if self._may_save and costs is not None and graphs.graphs:
            self._save(costs, rates, graphs)
        return costs, rates

    @property
    def _may_save(self) -> bool:
        return self._path is not None and self._ranks.rank == 0 and not self._exists

    def _save(
        self, costs: MeasuredCosts, rates: dict[str, PathRate] | None, graphs: GraphSet
    ) -> None:
        assert self._path is not None
        content = CostFile.of(
            self._encoder,
            costs,
            rates,
            fused=self._adapter.fused,
            graphs=len(graphs.graphs),
            largest_budget=max(key.token_budget for key in graphs.graphs),
            memory_bytes=graphs.memory_bytes,
        )
        try:
            write_costs(self._path, content)
        except OSError as error:
            logger.warning(
                "Encoder costs cannot be written to %s: %s; name a file in a folder "
                "that exists and can be written to",
                self._path,
                error.strerror or error,
            )
            return
        logger.info("Encoder costs are written to %s", self._path)


def _load(path: str, encoder: MeasuredEncoder) -> tuple[bool, CostFile | None]:
    """Whether there is a file, and its content if it is of `encoder`."""
    try:
        content = read_costs(path)
        differences = content.differences(encoder)
        if differences:
            raise CostFileError(
                f"{path}: its times are of {differences[0]}; name another file for "
                "this server"
            )
    except FileNotFoundError:
        return False, None
    except CostFileError as error:
        logger.warning("Encoder costs are measured, not read: %s", error)
        return True, None
    logger.info("Encoder costs are read from %s", path)
    return True, content
