# SPDX-License-Identifier: Apache-2.0
"""How much a batch asks of the host: operations launched around the encoder.

On a GPU each takes 4 to 10 microseconds of the host, and the GPU waits for those
before the replay.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.encoders import Encoders
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.encoder_inputs import image_batch

#: Launch nothing; the last two belong to ``tolist`` of a tensor on the host.
VIEWS = {"slice", "split", "split_with_sizes", "view", "flatten", "alias", "detach"}
VIEWS |= {"resolve_conj", "resolve_neg"}


class Launches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class NoReplay:
    def replay(self) -> None:
        pass


@pytest.fixture
def manager(
    request: pytest.FixtureRequest,
    encoders: Encoders,
    monkeypatch: pytest.MonkeyPatch,
) -> EncoderCudaGraphManager:
    """One whose replays do nothing."""
    manager = encoders.get(request.param).manager
    for graph in manager._graphs.graphs.values():
        monkeypatch.setattr(graph, "graph", NoReplay())
    return manager


def launches(manager: EncoderCudaGraphManager, images: int) -> tuple[Counter[str], int]:
    """What a batch of sizes that were seen before launches, and its sub-batches."""
    plans: list[Any] = []
    before = manager.observer
    manager.observer = lambda batch, plan, outputs: plans.append(plan)
    try:
        for seed in (0, 1):
            mm_kwargs = image_batch(manager.adapter, [(64, 64)] * images, seed)
            with torch.inference_mode(), Launches() as counted:
                assert manager.execute(mm_kwargs) is not None
    finally:
        manager.observer = before
    return counted.names, len(plans[-1].sub_batches)


@pytest.mark.parametrize(
    "manager",
    ["Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"],
    indirect=True,
)
@pytest.mark.parametrize("images", [1, 4])
def test_a_packed_batch_is_two_copies_in_and_one_out(
    manager: EncoderCudaGraphManager, images: int
) -> None:
    found, sub_batches = launches(manager, images)
    assert sub_batches == 1
    assert found.pop("zero_", 0) <= 1  # the tail, where pixels are not bytes
    assert found == {"copy_": 2, "clone": 1}


@pytest.mark.parametrize("manager", ["InternVLChatModel"], indirect=True)
@pytest.mark.parametrize("images", [1, 4])
def test_a_batch_of_tiles_is_one_copy_in_and_one_out(
    manager: EncoderCudaGraphManager, images: int
) -> None:
    found, sub_batches = launches(manager, images)
    assert sub_batches == 1
    assert found == {"copy_": 1, "clone": 1}
