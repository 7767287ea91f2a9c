# SPDX-License-Identifier: Apache-2.0
"""Which graphs are captured without running their forward before."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from vllm_encoder_cg.adapter import EncoderAdapter, GraphShape
from vllm_encoder_cg.graphs import Forward, GraphRecorder, MakeOutput, ReplayableGraph
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.ranks import EncoderRanks

logger = init_logger(__name__)


class WarmUps:
    """Runs a forward before its capture, unless that of a graph like it was.

    Args:
        every: whether all are run before.
    """

    def __init__(
        self, adapter: EncoderAdapter, ranks: EncoderRanks, every: bool = False
    ) -> None:
        self._adapter = adapter
        # A forward that communicates is run by all ranks or by none.
        self._every = every or ranks.share_forwards
        self._warm: set[Hashable] = set()
        self.failed = False
        """Whether a capture failed that was not run before; its pool is lost, so it
        is best to begin again, with every one run before."""

    def record(
        self,
        recorder: GraphRecorder,
        shape: GraphShape,
        forward: Forward,
        make_output: MakeOutput,
    ) -> tuple[ReplayableGraph, torch.Tensor]:
        """As ``GraphRecorder.record``."""
        key = None if self._every else self._adapter.warm_up_key(shape)
        if key is not None:
            key = (shape.key.group, key)
        if key not in self._warm:
            recorded = recorder.record(forward, make_output)
            if key is not None:
                self._warm.add(key)
            return recorded
        try:
            return recorder.record(forward, make_output, warm_up=False)
        except Exception as error:
            self.failed = True
            logger.info(
                "Encoder CUDA graph (%s) needs an uncaptured forward before its "
                "capture; all are captured anew, with one each: %s: %s",
                shape.key,
                type(error).__name__,
                str(error),
            )
            raise
