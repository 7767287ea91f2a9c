# SPDX-License-Identifier: Apache-2.0
"""Packed towers: every encoder by graph equals vLLM's own, in float32 to 1e-4."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.fused import fused
from tests.support.host_reads import NoHostAccess
from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.buffers import BufferArena
from vllm_encoder_cg.definitions import DEFAULT_PATH, BatchLimits, EagerReason, GraphKey
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.attention_tables import SequenceTable
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter
from vllm_encoder_cg.models.refusals import varlen_refusal
from vllm_encoder_cg.models.registry import find_adapter
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.samples.encoder_inputs import image_batch, video_batch
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import Verifier, eager_embeddings, oversize_case
from vllm_encoder_cg.verification_cases import Case, default_cases, images, videos

TOLERANCE = 1e-4
#: Few budgets and small media: seven towers are captured and run here.
BUDGETS = (64, 160, 512)
LARGEST_SIDE = 256
BOTH = ("image", "video")


@dataclass(frozen=True)
class Tower:
    """What is particular about a tower, for the tests below."""

    architecture: str
    modalities: tuple[str, ...] = BOTH
    sequence_lengths: bool = False
    """Whether it passes them to attention, as FLASHINFER needs."""
    embeddings: bool = True
    """Whether vLLM takes precomputed embeddings for this model."""
    longest_side: int = 8192

    def __str__(self) -> str:
        return self.architecture.removesuffix("ForConditionalGeneration")


QWEN2_5 = Tower("Qwen2_5_VLForConditionalGeneration", sequence_lengths=True)
ERNIE = Tower("Ernie4_5_VLMoeForConditionalGeneration", embeddings=False)
KIMI = Tower(
    "KimiVLForConditionalGeneration", ("image",), embeddings=False, longest_side=512
)
TOWERS = [
    Tower("Qwen2VLForConditionalGeneration"),
    QWEN2_5,
    Tower("Qwen3_5ForConditionalGeneration", sequence_lengths=True),
    Tower("Qwen3_5MoeForConditionalGeneration", sequence_lengths=True),
    Tower("Glm4vForConditionalGeneration"),
    ERNIE,
    KIMI,
]
every_tower = pytest.mark.parametrize("tower", TOWERS, ids=str)
video_towers = pytest.mark.parametrize(
    "tower", [tower for tower in TOWERS if "video" in tower.modalities], ids=str
)


@pytest.fixture(scope="module")
def verifiers() -> Iterator[Callable[[str], Verifier]]:
    """Captures an architecture's small sample tower at its first use."""
    with ExitStack() as stack:

        @functools.cache
        def build(architecture: str) -> Verifier:
            options = EncoderOptions(
                architecture=architecture,
                budgets=BUDGETS,
                max_tokens=max(BUDGETS),
                settings={"cost_model": False, "on_mismatch": "raise"},
            )
            return Verifier(stack.enter_context(captured_encoder(options)))

        yield build


@pytest.fixture
def verifier(verifiers: Callable[[str], Verifier], tower: Tower) -> Verifier:
    return verifiers(tower.architecture)


@pytest.fixture
def manager(verifier: Verifier) -> EncoderCudaGraphManager:
    return verifier.manager


@pytest.fixture
def adapter(manager: EncoderCudaGraphManager) -> PackedTowerAdapter:
    assert isinstance(manager.adapter, PackedTowerAdapter)
    return manager.adapter


def units(adapter: PackedTowerAdapter, count: int) -> int:
    """Pixels of so many tokens in a row."""
    vision = adapter.vllm_config.model_config.hf_config.vision_config
    return count * vision.patch_size * adapter.merge_size


def grids_of(adapter: PackedTowerAdapter, modality: str, *sizes: Any) -> dict[str, Any]:
    """Random inputs of (frames, height, width) in tokens."""
    merge = adapter.merge_size
    grids = [(t, merge * h, merge * w) for t, h, w in sizes]
    return adapter.random_kwargs(modality, grids, torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("tower", "case"),
    [
        pytest.param(tower, case, id=f"{tower}-{case.name}")
        for tower in TOWERS
        for case in default_cases(
            tower.modalities,
            max_items=8,
            largest_side=LARGEST_SIDE,
            random_batches=8,
        )
    ],
)
def test_equals_eager(tower: Tower, case: Case, verifier: Verifier) -> None:
    result = verifier.run(case)
    assert result.problems == []
    assert result.error < TOLERANCE
    assert result.hits > 0 and result.eager == 0


@every_tower
def test_fused_forward_equals_eager(tower: Tower, verifier: Verifier) -> None:
    batches = [images((96, 160), (64, 64), (224, 32)), images((256, 256))]
    if "video" in tower.modalities:
        batches.append(videos((4, 64, 96), (2, 128, 64)))
    with fused(verifier.manager.adapter):
        result = verifier.run(Case("fused", tuple(batches), poison=True))
    assert result.problems == []
    assert result.error < TOLERANCE
    assert result.hits > 0 and result.eager == 0


@every_tower
def test_above_every_budget_is_eager_and_its_neighbours_are_not(
    tower: Tower, verifier: Verifier
) -> None:
    case = oversize_case(verifier.manager, start=LARGEST_SIDE)
    assert case is not None
    result = verifier.run(case)
    assert result.problems == []
    assert (result.hits, result.eager) == (2, 2)
    assert result.eager_reasons == [EagerReason.ABOVE_EVERY_BUDGET.value]


@every_tower
def test_strips_with_garbage_in_the_buffers(
    tower: Tower, verifier: Verifier, adapter: PackedTowerAdapter
) -> None:
    one, long = units(adapter, 1), units(adapter, 129)
    batch = images((long, one), (one, one), (one, long))
    result = verifier.run(Case("strips", (batch,), poison=True))
    assert result.problems == []
    assert (result.hits, result.eager) == (3, 0)


@video_towers
def test_eager_video_among_others(
    tower: Tower, manager: EncoderCudaGraphManager, verifier: Verifier
) -> None:
    limits = [
        shape.capacity.extra["sequences"] for shape in manager._graphs.shapes.values()
    ]
    side = units(manager.adapter, 1)  # type: ignore[arg-type]
    long = 2 * (max(limits) + 1)
    batch = videos((4, 2 * side, side), (long, side, side), (6, side, 3 * side))
    result = verifier.run(Case("long among short", (batch,), poison=True))
    assert result.problems == []
    assert (result.hits, result.eager) == (2, 1)


@every_tower
def test_eager_gives_the_same_rows(
    tower: Tower, manager: EncoderCudaGraphManager, adapter: PackedTowerAdapter
) -> None:
    side = units(adapter, 1)
    inputs = [
        image_batch(adapter, [(2 * side, side), (side, side), (side, 5 * side)], 0)
    ]
    if "video" in tower.modalities:
        clips = [(4, side, 2 * side), (2, side, side), (8, 2 * side, 2 * side)]
        inputs.append(video_batch(adapter, clips, 0))
    for mm_kwargs in inputs:
        batch = adapter.parse(mm_kwargs)
        assert batch is not None
        expected = eager_embeddings(manager.model, mm_kwargs)
        assert [spec.output_tokens for spec in batch.specs] == [*map(len, expected)]
        with torch.inference_mode():
            rows = adapter.eager(batch, [2, 0])
        assert relative_norm(rows, torch.cat([expected[2], expected[0]])) < TOLERANCE
        assert rows.shape[1] == manager.config.out_hidden_size


@every_tower
def test_forward_reads_nothing_on_the_host(
    tower: Tower, adapter: PackedTowerAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU attention itself does; the bound that it is given stays on the host.
    def attend(_: Any, query: Any, key: Any, value: torch.Tensor, **__: Any) -> Any:
        return value.contiguous()

    monkeypatch.setattr(type(adapter.attention_layer), "forward", attend)
    bound = torch.tensor(64, dtype=torch.int32)
    monkeypatch.setattr(SequenceTable, "_max_seqlen", lambda _: bound)
    key = GraphKey(DEFAULT_PATH, 64)
    shape = GraphShape(key, adapter.capacity(key, BatchLimits(8, 8)))
    buffers = adapter.capture_buffers(shape, BufferArena(torch.device("cpu")))
    for forward in (contextlib.nullcontext(), fused(adapter)):
        with torch.inference_mode(), forward:
            adapter.forward(buffers, shape)
            with NoHostAccess():
                output = adapter.forward(buffers, shape)
        assert output.shape == (64, adapter.out_hidden_size)


@every_tower
def test_modalities(tower: Tower, manager: EncoderCudaGraphManager) -> None:
    for modality in BOTH:
        expected = modality in tower.modalities
        assert manager.supports_modality(modality) == expected


@every_tower
def test_only_the_exact_class(tower: Tower, manager: EncoderCudaGraphManager) -> None:
    model_class = type(manager.model)
    assert model_class.__name__ == tower.architecture
    assert find_adapter(model_class) is type(manager.adapter)
    assert tower.architecture in type(manager.adapter).architectures
    assert find_adapter(type("Subclass", (model_class,), {})) is None


@pytest.mark.parametrize("tower", [t for t in TOWERS if t.embeddings], ids=str)
@pytest.mark.parametrize("modality", BOTH)
def test_embeddings_go_to_the_model(
    tower: Tower, modality: str, manager: EncoderCudaGraphManager
) -> None:
    embeds = torch.randn(4, manager.config.out_hidden_size)
    mm_kwargs = {
        f"{modality}_embeds": embeds,
        f"{modality}_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    assert manager.execute(mm_kwargs) is None


@every_tower
def test_frames_beyond_the_positions_go_to_the_model(
    tower: Tower, adapter: PackedTowerAdapter
) -> None:
    if tower is ERNIE:
        return  # Its angles are computed for any side.
    longest = tower.longest_side // adapter.merge_size
    assert adapter.parse(grids_of(adapter, "image", (1, 1, longest))) is not None
    assert adapter.parse(grids_of(adapter, "image", (1, 1, longest + 1))) is None
    assert adapter.parse(grids_of(adapter, "image", (1, longest + 1, 1))) is None


@every_tower
def test_contradicting_sizes_go_to_the_model(
    tower: Tower, adapter: PackedTowerAdapter
) -> None:
    good = grids_of(adapter, "image", (1, 2, 3))
    assert adapter.parse(good) is not None
    pixels, grids = adapter.pixel_keys["image"], adapter.grid_keys["image"]
    one_row_less = {pixels: good[pixels][:-1]}
    odd = {grids: good[grids] - torch.tensor([0, 1, 1])[-good[grids].shape[1] :]}
    integers = {pixels: good[pixels].to(torch.int32)}
    for bad in (one_row_less, odd, {pixels: good[pixels][None]}):
        assert adapter.parse(good | bad) is None
    if adapter.pixel_dtype != torch.uint8:
        assert adapter.parse(good | integers) is None
    assert adapter.parse({pixels: good[pixels]}) is None
    assert adapter.parse({grids: good[grids]}) is None


@every_tower
def test_backends(tower: Tower, adapter: PackedTowerAdapter) -> None:
    def refusal(backend: str) -> str | None:
        return varlen_refusal(backend, "cuda", adapter.passes_sequence_lengths)

    assert adapter.passes_sequence_lengths == tower.sequence_lengths
    assert refusal("FLASH_ATTN") is None and refusal("TRITON_ATTN") is None
    reason = refusal("FLASHINFER")
    if tower.sequence_lengths:
        assert reason is None
    else:
        assert reason is not None and "one of FLASH_ATTN, TRITON_ATTN to" in reason
    assert "TORCH_SDPA" in (refusal("TORCH_SDPA") or "")
    assert varlen_refusal("TORCH_SDPA", "cpu", False) is None


@pytest.mark.parametrize("tower", [QWEN2_5], ids=str)
def test_windows_are_counted(tower: Tower, adapter: PackedTowerAdapter) -> None:
    batch = adapter.parse(grids_of(adapter, "video", (3, 5, 9), (1, 4, 4)))
    assert batch is not None
    assert [spec.demand["windows"] for spec in batch.specs] == [3 * 2 * 3, 1]


@pytest.mark.parametrize("tower", [QWEN2_5], ids=str)
def test_room_for_windows(
    tower: Tower, adapter: PackedTowerAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room() -> int:
        key = GraphKey(DEFAULT_PATH, 4096)
        return adapter.capacity(key, BatchLimits(64, 128)).extra["windows"]

    for backend, expected in (
        ("FLASH_ATTN", 128 + 4096 // 4),
        ("TRITON_ATTN", 16 + 4096 // 12 + 1),
        ("FLASHINFER", 128 + 4096 // 12 + 1),
    ):
        monkeypatch.setattr(type(adapter), "backend", backend)
        assert room() == expected


@pytest.mark.parametrize("tower", [ERNIE], ids=str)
def test_two_frames_make_one_token(tower: Tower, adapter: PackedTowerAdapter) -> None:
    batch = adapter.parse(grids_of(adapter, "video", (4, 2, 3), (2, 1, 1)))
    assert batch is not None
    assert [spec.output_tokens for spec in batch.specs] == [12, 1]
    assert [spec.demand["rows"] for spec in batch.specs] == [96, 8]
    for odd in (1, 3):
        assert adapter.parse(grids_of(adapter, "video", (odd, 2, 2))) is None
    assert adapter.parse(grids_of(adapter, "image", (2, 2, 2))) is None


@pytest.mark.parametrize("tower", [ERNIE], ids=str)
def test_no_resampler_without_its_temporal_step(
    tower: Tower, adapter: PackedTowerAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adapter.unsupported_reason() is None
    monkeypatch.setattr(adapter.model.resampler_model, "use_temporal_conv", False)
    assert "use_temporal_conv" in (adapter.unsupported_reason() or "")


@pytest.mark.parametrize("tower", [KIMI], ids=str)
def test_uneven_merge_kernel(
    tower: Tower, adapter: PackedTowerAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adapter.unsupported_reason() is None
    monkeypatch.setattr(adapter.tower, "merge_kernel_size", (2, 1))
    assert "merge kernel" in (adapter.unsupported_reason() or "")
