# SPDX-License-Identifier: Apache-2.0
"""The ranks that run one encoder together, and how they stay in step.

They are vLLM's tensor-parallel group.  With ``mm_encoder_tp_mode="data"`` each
rank has the whole encoder and encodes some items of a batch; nothing but the
exchange at the end of a batch (``data_parallel.py``) communicates.  With
``"weights"`` each rank has a shard of the encoder, every forward communicates,
and all ranks must run the same forwards in the same order.

What is exchanged here are small host values over the group's CPU side, so it
waits for no GPU.
"""

from __future__ import annotations

import contextlib
import enum
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch

from vllm_encoder_cg.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 300.0
"""How long a rank may be behind another while graphs are captured."""
BATCH_TIMEOUT_S = 60.0
"""Likewise after a batch failed on a rank; below the time after which vLLM gives
up on a batch."""


class EncoderMode(enum.Enum):
    """How the ranks share the encoder's work."""

    SINGLE = "single"
    """There is one rank."""
    DATA = "data"
    WEIGHTS = "weights"


def encoder_mode(vllm_config: Any) -> EncoderMode:
    """How `vllm_config` has the ranks share the encoder's work."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return EncoderMode.SINGLE
    multimodal = vllm_config.model_config.multimodal_config
    return EncoderMode(multimodal.mm_encoder_tp_mode)


def stage_refusal(vllm_config: Any) -> str | None:
    """Why this pipeline stage needs no encoder graphs, if so: vLLM encodes on the
    first stage, though others hold the encoder, too."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return None
    from vllm.distributed import get_pp_group

    if get_pp_group().is_first_rank:
        return None
    return "the first pipeline stage encodes, and this is another one"


class OutOfStepError(RuntimeError):
    """Ranks did not do the same, which a sharded encoder cannot recover from."""


class EncoderRanks:
    """What a manager knows of the other ranks.

    Args:
        mode: how work is shared.
        group: vLLM's ``GroupCoordinator`` of the ranks; None: there is one.
    """

    def __init__(self, mode: EncoderMode, group: Any = None) -> None:
        self.mode = mode
        self.group = group
        self.size: int = 1 if group is None else group.world_size
        self.rank: int = 0 if group is None else group.rank_in_group

    @classmethod
    def from_config(cls, vllm_config: Any) -> EncoderRanks:
        """The ranks of this process's tensor-parallel group."""
        mode = encoder_mode(vllm_config)
        if mode is EncoderMode.SINGLE:
            return cls(mode)
        from vllm.distributed import get_tp_group

        return cls(mode, get_tp_group())

    @property
    def share_items(self) -> bool:
        """Whether each rank encodes some of the items."""
        return self.mode is EncoderMode.DATA

    @property
    def share_forwards(self) -> bool:
        """Whether all ranks take part in each forward."""
        return self.mode is EncoderMode.WEIGHTS

    # -- Exchanges: every rank of the group calls them, in the same order -------

    def count(self, yes: bool, timeout_s: float | None = None) -> int:
        """Ranks that say yes.

        Args:
            timeout_s: None: as long as the group itself waits.

        Raises:
            OutOfStepError: another rank did not come in time, or has ended.
        """
        return self._add_up([int(yes)], timeout_s)[0]

    def vote(self, yes: bool, number: int) -> tuple[bool, list[int]]:
        """Whether every rank says yes, and a number of each, by rank.

        Raises:
            OutOfStepError: another rank has ended, or the group waited in vain.
        """
        numbers = [0] * self.size
        numbers[self.rank] = number
        votes, *numbers = self._add_up([int(yes), *numbers], None)
        return votes == self.size, numbers

    def _add_up(self, numbers: list[int], timeout_s: float | None) -> list[int]:
        """The sums over the ranks."""
        if self.size == 1:
            return numbers
        # Gloo writes to the tensor from a thread without inference mode.
        with torch.inference_mode(False):
            sums = torch.tensor(numbers)
            try:
                work = torch.distributed.all_reduce(
                    sums, group=self.group.cpu_group, async_op=True
                )
                if timeout_s is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                late = (
                    f", or is behind by more than {timeout_s:.0f} s"
                    if timeout_s
                    else ""
                )
                raise OutOfStepError(
                    "encoder CUDA graphs: another rank of the tensor-parallel group "
                    f"has ended{late}; its log says why ({error})"
                ) from error
            return sums.tolist()

    def all(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        return self.count(yes) == self.size

    def any(self, yes: bool) -> bool:
        """Whether a rank says yes."""
        return self.count(yes) > 0

    def everyone(self, value: T) -> list[T]:
        """The values of all ranks, by rank; they are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with torch.inference_mode(False):
            torch.distributed.all_gather_object(
                values, value, group=self.group.cpu_group
            )
        return values

    def from_first(self, value: T) -> T:
        """The first rank's value on every rank; it is pickled."""
        if self.size == 1:
            return value
        return self.group.broadcast_object(value, src=0)

    def in_step(self, value: T) -> T:
        """What to decide by: the first rank's value where all ranks take part in
        forwards, else this rank's own."""
        return self.from_first(value) if self.share_forwards else value

    def why_not_all(self, reason: str | None) -> str | None:
        """Why the ranks cannot do something together, the same on all of them; None:
        they can.

        Asked when a model has been loaded, which may take one rank minutes longer than
        another.

        Args:
            reason: why this rank cannot, if so.

        Raises:
            OutOfStepError: another rank has ended, or the group waited in vain.
        """
        if self.count(reason is None) == self.size:
            return None
        reasons = self.everyone(reason)
        if None not in reasons:
            return reasons[0]
        rank, why = next((r, why) for r, why in enumerate(reasons) if why is not None)
        return f"rank {rank} of {self.size} cannot use them, so no rank does: {why}"

    # -- Forwards that communicate ----------------------------------------------

    def ready_for_forward(self, ready: bool) -> bool:
        """Whether to begin a forward.

        Where all ranks take part in it: whether every rank is ready, so that none
        waits inside for one that is not.
        """
        if not self.share_forwards:
            return ready
        return self.count(ready, START_TIMEOUT_S) == self.size

    def after_forward(self, error: Exception | None) -> bool:
        """Whether a forward ended well, where all take part: on every rank.

        Raises:
            OutOfStepError: it failed on some ranks and not on others, so that
                collectives of one are not matched by another's.
        """
        if not self.share_forwards:
            return error is None
        well = self.count(error is None, START_TIMEOUT_S)
        if 0 < well < self.size:
            message = (
                "encoder CUDA graphs: a forward of the sharded encoder ended well on "
                f"{well} of {self.size} ranks, on rank {self.rank} with "
                f"{error or 'no error'}; set --mm-encoder-tp-mode to data, so that "
                "ranks do not depend on each other, or drop cudagraph_mm_encoder"
            )
            # Now, as leaving vLLM's context of captures may end the process.
            logger.error("%s", message)
            raise OutOfStepError(message) from error
        return well > 0

    def fail_alike(self, error: Exception) -> None:
        """Where all ranks take part in forwards: returns if a batch failed on all
        of them in the same place, so that they may do something else together.

        Raises:
            OutOfStepError: it did not, or not in time.
        """
        if not self.share_forwards:
            return
        self.count(False, BATCH_TIMEOUT_S)
        # Messages may name a GPU or its free memory.
        *_, frame = traceback.extract_tb(error.__traceback__)
        place = f"{type(error).__name__} in {frame.filename}:{frame.lineno}"
        places = self.everyone(place)
        if len(set(places)) > 1:
            raise OutOfStepError(
                f"encoder CUDA graphs: a batch failed unlike on the ranks: {places}"
            ) from error

    @contextlib.contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        """Encloses the recording of one graph; on leaving, it can be replayed.

        In vLLM's context of captures, its custom all-reduce hands out garbage to
        forwards that are not captured, and what is captured can be replayed only
        after leaving it, when ranks exchange the addresses.  The runner which
        called us leaves its context too late for checks and measurements, and for
        graphs that are given back before.
        """
        if not self.share_forwards or device.type != "cuda":
            yield
            return
        from vllm.distributed.parallel_state import GraphCaptureContext

        context = GraphCaptureContext(torch.cuda.current_stream(device))
        with self.group.graph_capture(context):
            yield
