# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL: the encoder by graph equals vLLM's own, in float32 to 1e-4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.encoders import LARGEST_SIDE, Encoders, cases
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.encoder_inputs import image_batch, video_batch
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import Verifier, eager_embeddings, oversize_case
from vllm_encoder_cg.verification_cases import Case, videos

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def verifier(encoders: Encoders) -> Verifier:
    return encoders.get(ARCHITECTURE)


@pytest.fixture(scope="module")
def manager(verifier: Verifier) -> EncoderCudaGraphManager:
    return verifier.manager


@pytest.fixture
def pixels(manager: EncoderCudaGraphManager) -> Iterator[dict[str, Any]]:
    """Inputs of three images of 8, 12 and 3 tokens."""
    yield image_batch(manager.adapter, [(128, 64), (96, 128), (32, 96)], seed=5)


def assert_equal_eager(
    manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    outputs = manager.execute(mm_kwargs)
    assert outputs is not None
    expected = eager_embeddings(manager.model, mm_kwargs)
    errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
    assert max(errors) < TOLERANCE
    return outputs


@pytest.mark.parametrize("case", cases(("image", "video")), ids=lambda case: case.name)
def test_equals_eager(case: Case, verifier: Verifier) -> None:
    assert verifier.manager.budgets.limits.max_items == 16
    result = verifier.run(case)
    assert result.problems == []
    assert result.error < TOLERANCE
    assert result.hits > 0 and result.eager == 0


def test_above_every_budget_is_eager_and_its_neighbours_are_not(
    verifier: Verifier,
) -> None:
    case = oversize_case(verifier.manager, start=LARGEST_SIDE)
    assert case is not None
    result = verifier.run(case)
    assert result.problems == []
    assert (result.hits, result.eager) == (2, 2)
    assert result.eager_reasons == [EagerReason.ABOVE_EVERY_BUDGET.value]


def test_more_frames_than_a_graph_has_sequences(verifier: Verifier) -> None:
    limits = {
        key: shape.capacity.extra["sequences"]
        for key, shape in verifier.manager._graphs.shapes.items()
    }
    frames = 2 * (max(limits.values()) + 1)
    result = verifier.run(Case("long video", (videos((frames, 32, 32)),)))
    assert result.problems == []
    assert (result.hits, result.eager) == (0, 1)


def test_equal_pixels_give_equal_outputs(manager: EncoderCudaGraphManager) -> None:
    one = image_batch(manager.adapter, [(128, 96)], seed=1)
    twice = {
        "pixel_values": one["pixel_values"].repeat(2, 1),
        "image_grid_thw": one["image_grid_thw"].repeat(2, 1),
    }
    first, second = assert_equal_eager(manager, twice)
    assert relative_norm(first, second) < TOLERANCE


def test_an_item_does_not_depend_on_its_company(
    manager: EncoderCudaGraphManager, pixels: dict[str, Any]
) -> None:
    together = assert_equal_eager(manager, pixels)
    rows = pixels["image_grid_thw"].prod(-1).tolist()
    patches = pixels["pixel_values"].split(rows)
    for values, grid, expected in zip(
        patches, pixels["image_grid_thw"], together, strict=True
    ):
        alone = {"pixel_values": values, "image_grid_thw": grid[None]}
        assert relative_norm(assert_equal_eager(manager, alone)[0], expected) < 1e-4


def test_outputs_stay_as_they_are(
    manager: EncoderCudaGraphManager, pixels: dict[str, Any]
) -> None:
    outputs = assert_equal_eager(manager, pixels)
    copies = [output.clone() for output in outputs]
    for seed in range(3):
        sizes = [(128, 128), (64, 96)]
        assert_equal_eager(manager, image_batch(manager.adapter, sizes, seed))
        manager.poison_buffers()
    assert all(map(torch.equal, outputs, copies))


def test_inputs_stay_as_they_are(
    manager: EncoderCudaGraphManager, pixels: dict[str, Any]
) -> None:
    copies = {name: value.clone() for name, value in pixels.items()}
    assert_equal_eager(manager, pixels)
    assert pixels.keys() == copies.keys()
    assert all(torch.equal(pixels[name], copies[name]) for name in copies)


def test_wide_outputs_hold_the_deepstack_levels(
    manager: EncoderCudaGraphManager, pixels: dict[str, Any]
) -> None:
    levels = len(manager.model.visual.deepstack_visual_indexes)
    hidden = manager.model.config.text_config.hidden_size
    outputs = manager.execute(pixels)
    assert outputs is not None
    assert [tuple(output.shape) for output in outputs] == [
        (tokens, hidden * (1 + levels)) for tokens in (8, 12, 3)
    ]


@pytest.mark.parametrize("modality", ["image", "video"])
def test_embeddings_go_to_the_model(
    manager: EncoderCudaGraphManager, modality: str
) -> None:
    unsupported = manager.stats.misses[EagerReason.UNSUPPORTED_INPUT]
    embeds = torch.randn(4, manager.config.out_hidden_size)
    mm_kwargs = {
        f"{modality}_embeds": embeds,
        f"{modality}_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    assert manager.execute(mm_kwargs) is None
    assert manager.stats.misses[EagerReason.UNSUPPORTED_INPUT] == unsupported + 1


@pytest.mark.parametrize(
    "grids",
    [
        [[1, 3, 4]],  # an odd height
        [[1, 4, 5]],
        [[0, 4, 4]],
        [[1, 0, 4]],
        [[1, -4, -4]],
        [[1, 4, 8]],  # more rows than there are pixels
        [[1, 2, 4]],  # fewer
        [1, 4, 4],  # a dimension too few
        [[4, 4]],
        [],
    ],
    ids=str,
)
def test_contradicting_grids_go_to_the_model(
    manager: EncoderCudaGraphManager, grids: list[Any]
) -> None:
    mm_kwargs = image_batch(manager.adapter, [(64, 64)], seed=0)
    assert_equal_eager(manager, mm_kwargs)
    mm_kwargs["image_grid_thw"] = torch.tensor(grids)
    assert manager.execute(mm_kwargs) is None


@pytest.mark.parametrize("mm_kwargs", [{}, {"pixel_values": torch.zeros(4, 1536)}])
def test_other_keywords_go_to_the_model(
    manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> None:
    assert manager.execute(mm_kwargs) is None


def test_pixels_of_another_type_or_width_go_to_the_model(
    manager: EncoderCudaGraphManager,
) -> None:
    good = image_batch(manager.adapter, [(64, 64)], seed=0)
    values = good["pixel_values"]
    assert values.dtype == torch.uint8
    for bad in (values.float(), values[:, :-1], values[None], values.tolist()):
        assert manager.execute(good | {"pixel_values": bad}) is None


def test_video_counts_as_video(manager: EncoderCudaGraphManager) -> None:
    seen: list[str] = []
    previous = manager.observer
    manager.observer = lambda batch, plan, outputs: seen.append(batch.modality)
    try:
        assert_equal_eager(manager, video_batch(manager.adapter, [(4, 64, 64)], 0))
        assert_equal_eager(manager, image_batch(manager.adapter, [(64, 64)], 0))
    finally:
        manager.observer = previous
    assert seen == ["video", "image"]
    assert manager.supports_modality("image") and manager.supports_modality("video")
    assert not manager.supports_modality("audio")


def test_token_pruning_turns_graphs_off(
    manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager.model, "is_multimodal_pruning_enabled", True)
    reason = manager.adapter.unsupported_reason()
    assert reason is not None and "--video-pruning-rate" in reason
