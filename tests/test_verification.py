# SPDX-License-Identifier: Apache-2.0
"""``verify`` fails where an encoder is wrong, and understands what it is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.encoders import Encoders
from tests.support.variants import (
    AttendsAcrossImages,
    KeepsStaleGrids,
    ReadsPadding,
    SwapsItems,
    make_variant,
)
from vllm_encoder_cg.adapter import EncoderAdapter
from vllm_encoder_cg.graph_set import GraphSet
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.verification import Verifier
from vllm_encoder_cg.verification_cases import (
    Case,
    MediaItem,
    default_cases,
    images,
    parse_items,
    videos,
)

CASE = Case(
    "two calls",
    (images((64, 96), (128, 64)), videos((4, 64, 32), (2, 32, 64))),
    poison=True,
)


@pytest.fixture(scope="module")
def sound(encoders: Encoders) -> EncoderCudaGraphManager:
    return encoders.get("Qwen3VLForConditionalGeneration").manager


def capture_unchecked(
    sound: EncoderCudaGraphManager,
    patch: pytest.MonkeyPatch,
    adapter: type[EncoderAdapter] | None = None,
) -> Verifier:
    manager = make_variant(sound, patch, adapter=adapter, self_check=False)
    manager.capture()
    return Verifier(manager)


@pytest.mark.parametrize(
    ("error", "allowed", "ok"), [(1.5e-4, 1.6e-4, True), (1.5e-4, 1e-4, False)]
)
def test_what_rounding_explains_is_no_mismatch(
    sound: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
    error: float,
    allowed: float,
    ok: bool,
) -> None:
    verifier = capture_unchecked(sound, monkeypatch)
    execute = verifier.manager.execute
    monkeypatch.setattr(
        verifier.manager, "execute", lambda kw: [x * (1 + error) for x in execute(kw)]
    )
    monkeypatch.setattr(
        "vllm_encoder_cg.verification.allowed_error", lambda *_: allowed
    )
    result = verifier.run(Case("one call", CASE.batches[:1]))
    assert result.ok is ok
    assert result.allowed_error == allowed


def test_a_sound_encoder_passes(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = capture_unchecked(sound, monkeypatch).run(CASE)
    assert result.ok and result.problems == []
    assert (result.calls, result.hits, result.eager) == (2, 4, 0)
    assert result.tokens == result.replayed_tokens == 6 + 8 + 4 + 2
    assert result.budgets == [64, 64]
    assert result.padding == pytest.approx(1 - 20 / 128)


def test_padding_is_that_of_the_statistics(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of whole tiles computes more than its budget."""
    sound = encoders.get("Gemma3ForConditionalGeneration").manager
    manager = make_variant(sound, monkeypatch, budgets=(20,), self_check=False)
    manager.capture()
    result = Verifier(manager).run(Case("one image", (images((64, 64)),)))
    assert result.budgets == [20] and result.computed_tokens > 20
    assert result.padding == manager.get_cumulative_stats()["padding_rate"] > 0


@pytest.mark.parametrize(
    "fault", [AttendsAcrossImages, KeepsStaleGrids, SwapsItems, ReadsPadding]
)
def test_a_fault_is_found(
    fault: type[EncoderAdapter],
    sound: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = capture_unchecked(sound, monkeypatch, fault).run(CASE)
    assert not result.ok
    assert result.error > 1e-2
    assert "differs by" in result.problems[0]


def test_outputs_that_are_buffers_are_found(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replay_without_a_copy(
        graphs: GraphSet, key: Any, adapter: Any, batch: Any, indices: Any
    ) -> torch.Tensor:
        graph = graphs.graphs[key]
        adapter.fill(batch, indices, graph.input_buffers, graphs.shapes[key])
        graph.graph.replay()
        rows = adapter.output_rows(batch, indices, key.path)
        return graph.output_buffer[:rows]

    monkeypatch.setattr(GraphSet, "replay", replay_without_a_copy)
    result = capture_unchecked(sound, monkeypatch).run(CASE)
    assert result.problems == ["changed the outputs of an earlier call"]


def test_a_batch_that_was_not_planned_is_a_problem(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = capture_unchecked(sound, monkeypatch)
    monkeypatch.setattr(verifier.manager.adapter, "parse", lambda _: None)
    result = verifier.run(CASE)
    assert result.problems == ["the batch was not planned"] * 2


def test_nothing_to_verify_is_an_error(
    sound: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no encoder graphs of Qwen3VL"):
        Verifier(make_variant(sound, monkeypatch))


def test_items_as_text() -> None:
    case = parse_items("640x480, 336x336*3,video:16x448x336,video:2x64x64*2,10x20")
    assert [str(batch) for batch in case.batches] == [
        "640x480, 336x336*3",
        "video:16x448x336, video:2x64x64*2",
        "10x20",
    ]
    assert [batch.modality for batch in case.batches] == ["image", "video", "image"]
    assert case.batches[1].items[0] == MediaItem("video", 16, 448, 336)
    assert case.describe() == "; ".join(map(str, case.batches))


@pytest.mark.parametrize(
    "text",
    ["", "640", "640x", "640x480x3", "0x480", "video:1x64x64", "64x64*0", "a,64x64"],
)
def test_items_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"^items: got '"):
        parse_items(text)


def test_default_cases_reach_full_scale() -> None:
    cases = {case.name: case for case in default_cases(["image", "video"], 64)}
    counts = {len(batch.items) for case in cases.values() for batch in case.batches}
    assert {1, 2, 4, 20, 65} <= counts
    items = [i for c in cases.values() for batch in c.batches for i in batch.items]
    assert max(item.width for item in items) == 2048
    assert {2, 64} <= {item.frames for item in items}
    orders = [[batch.modality for batch in case.batches] for case in cases.values()]
    assert ["image", "video", "image"] in orders
    assert any(case.poison for case in cases.values())
    assert len(cases["100 random batches"].batches) == 100


def test_default_cases_without_videos() -> None:
    cases = default_cases(["image"], 16, largest_side=256, random_batches=5)
    items = [i for c in cases for batch in c.batches for i in batch.items]
    assert {item.modality for item in items} == {"image"}
    assert max(max(item.width, item.height) for item in items) == 256


def test_cases_are_the_same_every_time() -> None:
    assert default_cases(["image"], 16, seed=3) == default_cases(["image"], 16, seed=3)
    assert default_cases(["image"], 16, seed=3) != default_cases(["image"], 16, seed=4)
