# SPDX-License-Identifier: Apache-2.0
"""One graph that cannot be captured takes nothing else with it."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.support.encoders import Encoders
from tests.support.variants import make_variant
from vllm_encoder_cg.adapter import BufferSpec, GraphShape
from vllm_encoder_cg.buffers import BufferArena
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.qwen3_vl import Qwen3VLAdapter
from vllm_encoder_cg.samples.encoder_inputs import image_batch
from vllm_encoder_cg.startup.memory_meter import MemoryMeter
from vllm_encoder_cg.verification import Verifier
from vllm_encoder_cg.verification_cases import Case, MediaBatch, images

BUDGETS = [16, 32, 48, 64, 96, 128, 192, 256]

SMALL = images((64, 64), (96, 64))  # 4 + 6 tokens
IN_THIRD = images((320, 320))  # 100 tokens: for the third largest, 128
LARGE = images((512, 512))  # 256 tokens


class FailsAt(Qwen3VLAdapter):
    """Cannot be captured at some budgets."""

    budgets: ClassVar[set[int]] = set()

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        if shape.key.token_budget in self.budgets:
            raise torch.OutOfMemoryError("no memory, on purpose")
        return super().forward(buffers, shape)


@pytest.fixture(scope="module")
def sound(encoders: Encoders) -> EncoderCudaGraphManager:
    return encoders.get("Qwen3VLForConditionalGeneration").manager


def make_failing(
    sound: EncoderCudaGraphManager, patch: pytest.MonkeyPatch, budgets: set[int]
) -> EncoderCudaGraphManager:
    patch.setattr(FailsAt, "budgets", budgets)
    return make_variant(sound, patch, adapter=FailsAt, budgets=BUDGETS)


def replayed(manager: EncoderCudaGraphManager, batch: MediaBatch) -> list[int]:
    """Budgets that a batch goes through, compared with eager."""
    result = Verifier(manager).run(Case("batch", (batch,), poison=True))
    assert result.problems == []
    return result.budgets


def test_the_other_seven_serve(
    sound: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    manager = make_failing(sound, monkeypatch, {128})
    manager.capture()
    warnings = [r.getMessage() for r in package_log.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "budget 128" in warnings[0] and "no memory, on purpose" in warnings[0]
    stats = manager.get_cumulative_stats()
    assert stats["num_budgets"] == 7
    assert len(stats["dropped_graphs"]) == 1 and "128" in stats["dropped_graphs"][0]
    assert replayed(manager, SMALL) == [16]
    assert replayed(manager, IN_THIRD) == [192]
    assert replayed(manager, LARGE) == [256]


def test_without_the_largest_its_items_are_eager(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_failing(sound, monkeypatch, {256})
    manager.capture()
    assert replayed(manager, LARGE) == []
    assert manager.stats.misses[EagerReason.DROPPED_GRAPH] == 1
    both = images((512, 512), (64, 64))
    assert replayed(manager, both) == [16]
    assert replayed(manager, IN_THIRD) == [128]


def test_where_all_fail_the_model_encodes(
    sound: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    manager = make_failing(sound, monkeypatch, set(BUDGETS))
    manager.capture()
    assert not manager.is_captured()
    assert "No encoder CUDA graph could be captured" in package_log.text
    assert manager.execute(image_batch(sound.adapter, [(64, 64)], 0)) is None


def test_the_next_capture_may_succeed(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_failing(sound, monkeypatch, {128})
    manager.capture()
    monkeypatch.setattr(FailsAt, "budgets", set())
    manager.capture(graph_pool=None)
    assert manager.get_cumulative_stats()["num_budgets"] == 8
    assert manager.get_cumulative_stats()["dropped_graphs"] == []
    assert replayed(manager, IN_THIRD) == [128]


def test_before_capture_and_after_clear_the_model_encodes(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_variant(sound, monkeypatch)
    mm_kwargs = image_batch(sound.adapter, [(64, 64)], 0)
    assert not manager.is_captured() and manager.execute(mm_kwargs) is None
    manager.capture()
    first = manager.execute(mm_kwargs)
    assert manager.is_captured() and first is not None
    manager.clear()
    assert not manager.is_captured() and manager.execute(mm_kwargs) is None
    manager.clear()
    manager.capture()
    again = manager.execute(mm_kwargs)
    assert again is not None
    torch.testing.assert_close(again[0], first[0])


def test_outputs_outlive_the_graphs(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_variant(sound, monkeypatch)
    manager.capture()
    outputs = manager.execute(image_batch(sound.adapter, [(64, 64)], 0))
    assert outputs is not None
    copy = outputs[0].clone()
    manager.poison_buffers()
    manager.clear()
    manager.capture()
    assert torch.equal(outputs[0], copy)


def test_graphs_to_capture_are_known_before(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_variant(sound, monkeypatch, budgets=BUDGETS)
    assert manager.get_num_graphs_to_capture() == len(BUDGETS)
    assert manager.token_budgets == BUDGETS


def test_what_exceeds_the_memory_limit_is_left_out(
    sound: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    # As on a GPU on which the graphs of the largest budget take 1 MiB per token.
    peaks = iter([budget << 20 for budget in (256, 96)])
    monkeypatch.setattr(
        "vllm_encoder_cg.startup.capture.peak_bytes",
        lambda call, _: (call(), next(peaks)),
    )
    manager = make_variant(
        sound, monkeypatch, budgets=BUDGETS, memory_limit_gib=100 / 1024
    )
    manager.capture()
    stats = manager.get_cumulative_stats()
    assert stats["num_budgets"] == 5 and stats["dropped_graphs"] == []
    assert any("memory_limit_gib" in r.getMessage() for r in package_log.records)
    assert replayed(manager, SMALL) == [16]
    assert manager.execute(image_batch(sound.adapter, [(512, 512)], 0)) is None
    reasons = manager.get_cumulative_stats()["misses_by_reason"]
    assert reasons[EagerReason.ABOVE_EVERY_BUDGET.value] == 1


def test_a_capture_that_takes_more_than_its_forward_is_left_out(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a forward takes uncaptured is a forecast; the device has the last word."""
    peaks = iter([mib << 20 for mib in (80, 40)])
    taken = iter([mib << 20 for mib in (160, 70, 70)])
    monkeypatch.setattr(
        "vllm_encoder_cg.startup.capture.peak_bytes",
        lambda call, _: (call(), next(peaks)),
    )
    monkeypatch.setattr(MemoryMeter, "taken_bytes", lambda _: next(taken))
    manager = make_variant(
        sound, monkeypatch, budgets=BUDGETS, memory_limit_gib=100 / 1024
    )
    manager.capture()
    stats = manager.get_cumulative_stats()
    assert stats["num_budgets"] == sum(b <= 256 * 100 / 160 for b in BUDGETS)
    assert stats["graph_memory_bytes"] == 70 << 20
    assert stats["dropped_graphs"] == []
    assert replayed(manager, SMALL) == [16]


def test_a_path_that_is_left_out_gives_its_buffers_back() -> None:
    arena = BufferArena(torch.device("cpu"))
    whole = arena.inputs("whole", {"pixels": BufferSpec((8, 2), torch.float32)})
    kept = arena.nbytes()
    arena.inputs("crop", {"pixels": BufferSpec((4, 2), torch.float32)})
    arena.inputs("crop", {"pixels": BufferSpec((64, 2), torch.float32)})
    arena.output("crop", (64, 2), torch.float32)
    arena.release("crop")
    assert arena.nbytes() == kept == whole["pixels"].numel() * 4
