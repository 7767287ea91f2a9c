# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 and MiniCPM-V: graphs equal vLLM's own encoders, in float32 to 1e-4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.encoders import LARGEST_SIDE, SETTINGS
from tests.support.host_reads import NoHostAccess, one_hot
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.soft_token_rows import write_token_rows
from vllm_encoder_cg.planning.planner import Plan
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.samples.encoder_inputs import image_batch, video_batch
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import Verifier, eager_embeddings
from vllm_encoder_cg.verification_cases import Case, default_cases

TOLERANCE = 1e-4
GEMMA4 = "Gemma4ForConditionalGeneration"
MINICPMV = ("MiniCPMV2_5", "MiniCPMV2_6", "MiniCPMV4_0", "MiniCPMV4_5")

#: Narrow images, and room for a video of 16 frames.
GEMMA4_OPTIONS = {
    "engine": {"mm_processor_kwargs": {"max_soft_tokens": 140}},
    "max_tokens": 1120,
}
#: Slices of the released size.
LARGE_SLICES = {"engine": {"hf_overrides": {"image_size": 448}}, "max_tokens": 64}

#: The versions of MiniCPM-V share their code, and the sizes of Gemma 4's rows do not
#: depend on those of images: only MiniCPM-V 2.6 runs all cases.
ALL_CASES = default_cases(
    ("image", "video"), 8, largest_side=LARGEST_SIDE, random_batches=6
)
SHORT = ("4 unlike images", "NaN in buffers")
CASES = [
    *(("MiniCPMV2_6", case) for case in ALL_CASES),
    *(
        (architecture, case)
        for architecture in ("MiniCPMV2_5", "MiniCPMV4_0", "MiniCPMV4_5")
        for case in ALL_CASES
        if case.name in SHORT
    ),
    *(
        (GEMMA4, case)
        for case in ALL_CASES
        if case.name
        in (
            *SHORT,
            "1 row, 1 column",
            "more than max items",
            "same pixels twice",
            "video of 16 frames",
            "4 unlike videos",
            "image, video, image",
            "6 random batches",
        )
    ),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def verifiers(stack: ExitStack) -> dict[str, Verifier]:
    """Verifiers of captured encoders, made at first use."""

    class Verifiers(dict[str, Verifier]):
        def __missing__(self, architecture: str) -> Verifier:
            more: dict[str, Any] = GEMMA4_OPTIONS if architecture == GEMMA4 else {}
            manager = stack.enter_context(make_encoder(architecture, more))
            self[architecture] = Verifier(manager)
            return self[architecture]

    return Verifiers()


def make_encoder(architecture: str, more: dict[str, Any]) -> Any:
    options = EncoderOptions(architecture=architecture, settings=SETTINGS, **more)
    return captured_encoder(options)


@pytest.fixture(scope="module")
def gemma4(verifiers: dict[str, Verifier]) -> EncoderCudaGraphManager:
    return verifiers[GEMMA4].manager


@pytest.fixture(scope="module")
def minicpmv(verifiers: dict[str, Verifier]) -> EncoderCudaGraphManager:
    return verifiers["MiniCPMV2_6"].manager


@pytest.fixture(scope="module")
def large_slices(stack: ExitStack) -> EncoderCudaGraphManager:
    """MiniCPM-V 2.6 with slices of about 32 x 32 patches."""
    return stack.enter_context(make_encoder("MiniCPMV2_6", LARGE_SLICES))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(
    manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]
) -> dict[int, EagerReason]:
    """Compares a batch with eager; returns why items were encoded eagerly."""
    plans: list[Plan] = []
    manager.observer = lambda batch, plan, outputs: plans.append(plan)
    manager.poison_buffers()
    outputs = manager.execute(mm_kwargs)
    expected = eager_embeddings(manager.model, mm_kwargs)
    if outputs is not None:
        errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
        assert max(errors) < TOLERANCE
    reasons: dict[int, EagerReason] = {}
    for sub_batch in plans[0].sub_batches:
        reasons |= sub_batch.eager_reasons
    return reasons


# -- The cases of every adapter ------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "case"), CASES, ids=lambda value: getattr(value, "name", value)
)
def test_equals_eager(
    architecture: str, case: Case, verifiers: dict[str, Verifier]
) -> None:
    result = verifiers[architecture].run(case)
    assert result.problems == []
    assert result.error < TOLERANCE
    assert result.hits > 0
    # Videos of random batches may be longer than any of these graphs.
    assert result.eager == 0 or len(case.batches) > 4
    assert set(result.eager_reasons) <= {EagerReason.ABOVE_EVERY_BUDGET.value}


def test_items_beyond_every_budget(verifiers: dict[str, Verifier]) -> None:
    for architecture in (GEMMA4, "MiniCPMV2_6"):
        manager = verifiers[architecture].manager
        frames = max(
            shape.capacity.extra["rows"] for shape in manager._graphs.shapes.values()
        )
        clips = [(2, 64, 64), (frames + 1, 64, 64), (3, 64, 48)]
        reasons = run(manager, video_batch(manager.adapter, clips, seed=3))
        assert reasons == {1: EagerReason.ABOVE_EVERY_BUDGET}


@pytest.mark.parametrize("architecture", [GEMMA4, "MiniCPMV2_5", "MiniCPMV2_6"])
def test_the_forward_never_involves_the_host(
    architecture: str,
    verifiers: dict[str, Verifier],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.nn.functional.one_hot", one_hot)
    manager = verifiers[architecture].manager
    for key, graph in manager._graphs.graphs.items():
        if key.token_budget > 140:
            continue
        shape = manager._graphs.shapes[key]
        batch = manager.adapter.parse(manager.adapter.sample(shape, seed=1) or {})
        assert batch is not None
        indices = range(len(batch.specs))
        manager.adapter.fill(batch, indices, graph.input_buffers, shape)
        with torch.inference_mode(), NoHostAccess():
            manager.adapter.forward(graph.input_buffers, shape)


@pytest.mark.parametrize("architecture", [GEMMA4, "MiniCPMV2_6"])
def test_no_two_graphs_have_equal_rows(
    architecture: str, verifiers: dict[str, Verifier]
) -> None:
    shapes = verifiers[architecture].manager._graphs.shapes
    rows = [(key.axis_keys, s.capacity.extra["rows"]) for key, s in shapes.items()]
    assert len(set(rows)) == len(rows)


# -- Gemma 4 -------------------------------------------------------------------


def test_frames_are_compact_in_the_order_of_the_prompt(
    gemma4: EncoderCudaGraphManager,
) -> None:
    clips = [[(7, 9), (8, 8), (6, 11)], [(8, 8)] * 2, [(1, 1), (7, 10)]]
    mm_kwargs = gemma4.adapter.random_videos(clips, generator())
    outputs = gemma4.execute(mm_kwargs)
    assert outputs is not None
    assert [len(output) for output in outputs] == [63 + 64 + 66, 128, 71]
    assert run(gemma4, mm_kwargs) == {}


@pytest.mark.parametrize(
    "tokens", [None, [], [[63], [64, 64]]], ids=["absent", "empty", "too few"]
)
def test_tokens_of_frames_are_counted_where_they_are_not_given(
    gemma4: EncoderCudaGraphManager, tokens: Any
) -> None:
    clips = [[(7, 9), (8, 8)], [(6, 11)] * 2]
    mm_kwargs = gemma4.adapter.random_videos(clips, generator(1))
    mm_kwargs["video_num_soft_tokens"] = tokens
    assert run(gemma4, mm_kwargs) == {}


def test_images_with_and_without_padding(gemma4: EncoderCudaGraphManager) -> None:
    grids = [(10, 14), (1, 1), (11, 12), (14, 10), (140, 1)]
    assert run(gemma4, gemma4.adapter.random_images(grids, generator(2))) == {}
    # vLLM's own path takes another kind of attention where nothing is padded.
    full = gemma4.adapter.random_images([(10, 14)] * 2, generator(3))
    assert run(gemma4, full) == {}


def test_a_width_without_graphs_is_eager_and_its_neighbours_are_not(
    gemma4: EncoderCudaGraphManager,
) -> None:
    assert gemma4.config.capture_axes == ((140, 70),)
    adapter = gemma4.adapter
    batches = [
        adapter.random_images([(10, 14)], generator(4)),
        adapter.random_images([(16, 17)], generator(5), width=280),
        adapter.random_images([(8, 8)], generator(6), width=70),
        adapter.random_images([(9, 13)], generator(7)),
    ]
    mixed = {
        name: [batch[name][0] for batch in batches]
        for name in ("pixel_values", "pixel_position_ids")
    }
    assert run(gemma4, mixed) == {1: EagerReason.UNCAPTURED_LAYOUT}
    assert run(gemma4, batches[1]) == {0: EagerReason.UNCAPTURED_LAYOUT}


@pytest.mark.parametrize(
    ("kwargs", "width"),
    [
        (None, 280),
        ({}, 280),
        ({"max_soft_tokens": 560}, 560),
        ({"images_kwargs": {"max_soft_tokens": 140}}, 140),
        ({"max_soft_tokens": 70}, 70),
    ],
    ids=str,
)
def test_the_configured_width_has_graphs(
    gemma4: EncoderCudaGraphManager,
    monkeypatch: pytest.MonkeyPatch,
    kwargs: Any,
    width: int,
) -> None:
    multimodal = gemma4.vllm_config.model_config.multimodal_config
    monkeypatch.setattr(multimodal, "mm_processor_kwargs", kwargs)
    widths = (width,) if width == 70 else (width, 70)
    assert gemma4.adapter.config().capture_axes == (widths,)


def test_what_is_no_row_of_gemma4_goes_to_the_model(
    gemma4: EncoderCudaGraphManager,
) -> None:
    images = gemma4.adapter.random_images([(4, 5), (6, 6)], generator())
    videos = gemma4.adapter.random_videos([[(4, 5)] * 2], generator())
    pixels, places = images["pixel_values"], images["pixel_position_ids"]
    for bad in (
        {},
        {"image_embeds": torch.zeros(1, 4, 8)},
        {"pixel_values": pixels},
        images | videos,
        images | {"pixel_values": pixels[:, :, :-1]},
        images | {"pixel_values": pixels.double()},
        images | {"pixel_values": pixels[:1]},
        images | {"pixel_values": pixels[0]},
        images | {"pixel_values": pixels.tolist()},
        images | {"pixel_position_ids": places[:, :-1]},
        images | {"pixel_position_ids": places.int()},
        images | {"pixel_position_ids": torch.full_like(places, -1)},
        {name: value[:, :-1] for name, value in images.items()},
        {name: value[:0] for name, value in images.items()},
        videos | {"video_frame_counts": None},
        videos | {"video_frame_counts": torch.tensor([3])},
        videos | {"video_frame_counts": torch.tensor([0, 2])},
    ):
        assert gemma4.adapter.parse(bad) is None
        assert gemma4.execute(bad) is None


def test_other_attention_turns_graphs_off(
    gemma4: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gemma4.model.vision_tower.config
    monkeypatch.setattr(config, "_attn_implementation_internal", "eager")
    reason = gemma4.adapter.unsupported_reason()
    assert reason is not None and "attn_implementation" in reason


def test_token_rows() -> None:
    out = np.full(9, -1, dtype=np.int32)
    write_token_rows([2, 1, 3], 4, out)
    assert out.tolist() == [0, 1, 4, 8, 9, 10, 0, 0, 0]


# -- MiniCPM-V -----------------------------------------------------------------


def test_slices_of_every_layout_share_a_graph(
    large_slices: EncoderCudaGraphManager,
) -> None:
    assert large_slices.config.capture_axes == ((1056,),)
    items = [[(28, 37), (39, 26), (39, 26)], [(16, 64)], [(32, 33), (1, 1)]]
    mm_kwargs = large_slices.adapter.random_kwargs("image", items, generator())
    assert run(large_slices, mm_kwargs) == {}
    frames = large_slices.adapter.random_kwargs("video", items, generator(1))
    assert run(large_slices, frames) == {}


def test_extreme_slices_are_eager_and_change_no_graph(
    large_slices: EncoderCudaGraphManager,
) -> None:
    adapter = large_slices.adapter
    items = [
        [(28, 37), (39, 26)],
        [(8, 128)],  # more columns than the resampler has positions for
        [(32, 32), (34, 34)],  # more patches than any graph's rows have
        [(40, 25)],
    ]
    reasons = run(large_slices, adapter.random_kwargs("image", items, generator(2)))
    assert reasons == dict.fromkeys((1, 2), EagerReason.UNCAPTURED_LAYOUT)
    # vLLM has replaced the table of positions that the graphs read.
    assert large_slices.model.resampler.pos_embed.shape[1] == 128
    again = adapter.random_kwargs("image", [items[0], items[3]], generator(3))
    assert run(large_slices, again) == {}


def test_encoders_in_data_parallel_are_called_below_their_sharding(
    minicpmv: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = minicpmv.adapter
    mm_kwargs = image_batch(adapter, [(300, 200), (64, 64), (112, 400)], seed=8)
    expected = eager_embeddings(minicpmv.model, mm_kwargs)
    batch = adapter.parse(mm_kwargs)
    assert batch is not None
    monkeypatch.setattr(minicpmv.model, "use_data_parallel", True)
    with torch.inference_mode():
        rows = adapter.eager(batch, [2, 0])
    assert relative_norm(rows, torch.cat([expected[2], expected[0]])) < TOLERANCE


def test_sizes_may_come_as_one_tensor(minicpmv: EncoderCudaGraphManager) -> None:
    items = [[(8, 8), (7, 9)], [(6, 10), (9, 7)]]
    mm_kwargs = minicpmv.adapter.random_kwargs("image", items, generator())
    mm_kwargs["tgt_sizes"] = torch.stack(mm_kwargs["tgt_sizes"])
    assert run(minicpmv, mm_kwargs) == {}


def test_what_are_no_slices_goes_to_the_model(
    minicpmv: EncoderCudaGraphManager, verifiers: dict[str, Verifier]
) -> None:
    items = [[(8, 8), (7, 9)], [(6, 10)]]
    images = minicpmv.adapter.random_kwargs("image", items, generator())
    videos = minicpmv.adapter.random_kwargs("video", items, generator())
    pixels, sizes = images["pixel_values"], images["tgt_sizes"]
    for bad in (
        {},
        {"image_embeds": torch.zeros(1, 8, 256)},
        {"video_embeds": torch.zeros(1, 8, 256)},
        images | {"temporal_ids": [[-1]]},
        images | videos,
        {"pixel_values": pixels},
        images | {"pixel_values": pixels[:1]},
        images | {"pixel_values": [pixels[0], []]},
        images | {"pixel_values": [pixels[0], [None]]},
        images | {"pixel_values": [pixels[0], [pixels[1][0].double()]]},
        images | {"pixel_values": torch.zeros(2, 3, 14, 14)},
        images | {"tgt_sizes": [sizes[0], torch.tensor([[6, 9]])]},
        images | {"tgt_sizes": [sizes[0], torch.tensor([[-6, -10]])]},
        images | {"tgt_sizes": [sizes[0], torch.tensor([6, 10])]},
        images | {"tgt_sizes": [sizes[0][:1], sizes[1]]},
        {"pixel_values": [], "tgt_sizes": []},
    ):
        assert minicpmv.adapter.parse(bad) is None
        assert minicpmv.execute(bad) is None
    images_only = verifiers["MiniCPMV2_5"].manager
    assert not images_only.supports_modality("video")
    assert images_only.adapter.parse(videos) is None
