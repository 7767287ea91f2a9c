# SPDX-License-Identifier: Apache-2.0
"""InternVL, Gemma 3, Llama 4: the encoder by graph equals vLLM's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.encoders import Encoders, cases
from tests.support.host_reads import NoHostAccess
from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    BatchLimits,
    EagerReason,
    EncoderCudaGraphPathConfig,
    GraphKey,
)
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.planning.budgets import fine_levels, resolve_budgets
from vllm_encoder_cg.planning.planner import Plan
from vllm_encoder_cg.settings import CompilationFields, EncoderCgSettings
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import Verifier, eager_embeddings
from vllm_encoder_cg.verification_cases import Case

INTERNVL = "InternVLChatModel"
GEMMA3 = "Gemma3ForConditionalGeneration"
LLAMA4 = "Llama4ForConditionalGeneration"
ARCHITECTURES = (INTERNVL, GEMMA3, LLAMA4)
TOLERANCE = 1e-4

CASES = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name in ARCHITECTURES
    for case in cases(("image", "video") if name == INTERNVL else ("image",))
]

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture
def verifier(architecture: str, encoders: Encoders) -> Verifier:
    return encoders.get(architecture)


@pytest.fixture
def manager(verifier: Verifier) -> EncoderCudaGraphManager:
    return verifier.manager


def batch(manager: EncoderCudaGraphManager, *counts: int, seed: int = 0) -> Any:
    """Inputs of images of so many tiles."""
    generator = torch.Generator().manual_seed(seed)
    return manager.adapter.random_items("image", counts, generator)


def run(manager: EncoderCudaGraphManager, mm_kwargs: dict[str, Any]) -> Plan:
    """Encodes a batch, compares it with vLLM's own, and returns its plan."""
    plans: list[Plan] = []
    previous = manager.observer
    manager.observer = lambda batch, plan, outputs: plans.append(plan)
    try:
        outputs = manager.execute(mm_kwargs)
    finally:
        manager.observer = previous
    if outputs is not None:
        expected = eager_embeddings(manager.model, mm_kwargs)
        errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
        assert max(errors) < TOLERANCE
    return plans[0]


@pytest.mark.parametrize(("architecture", "case"), CASES)
def test_equals_eager(case: Case, verifier: Verifier) -> None:
    result = verifier.run(case)
    assert result.problems == []
    assert result.error < TOLERANCE
    assert result.hits > 0 and result.eager == 0


@each_architecture
def test_above_every_budget_is_eager_and_its_neighbours_are_not(
    manager: EncoderCudaGraphManager,
) -> None:
    tile = manager.adapter.kinds[DEFAULT_PATH].tokens
    most = 1024 // tile
    plan = run(manager, batch(manager, 1, most + 1, 2, most))
    by_graph = [sub for sub in plan.sub_batches if not sub.eager_reasons]
    assert sorted(i for sub in by_graph for i in sub.indices) == [0, 2, 3]
    eager = {i: r for sub in plan.sub_batches for i, r in sub.eager_reasons.items()}
    assert eager == {1: EagerReason.ABOVE_EVERY_BUDGET}


@each_architecture
def test_items_without_tiles_are_empty(manager: EncoderCudaGraphManager) -> None:
    mm_kwargs = batch(manager, 0, 2, 0)
    outputs = manager.execute(mm_kwargs)
    assert outputs is not None
    width = manager.config.out_hidden_size
    tile = manager.adapter.kinds[DEFAULT_PATH].tokens
    assert [tuple(o.shape) for o in outputs] == [
        (0, width),
        (2 * tile, width),
        (0, width),
    ]


@each_architecture
def test_an_item_does_not_depend_on_its_company(
    manager: EncoderCudaGraphManager,
) -> None:
    together = batch(manager, 3, 1, 2)
    outputs = manager.execute(together)
    assert outputs is not None
    pixel_key = manager.adapter.pixel_keys["image"]
    alone = batch(manager, 1) | {pixel_key: together[pixel_key][3:4]}
    (output,) = manager.execute(alone)  # type: ignore[misc]
    assert relative_norm(output, outputs[1]) < TOLERANCE


@each_architecture
def test_outputs_stay_as_they_are(manager: EncoderCudaGraphManager) -> None:
    outputs = manager.execute(batch(manager, 2, 1, 5))
    assert outputs is not None
    copies = [output.clone() for output in outputs]
    for seed in range(3):
        run(manager, batch(manager, 4, 4, seed=seed))
        manager.poison_buffers()
    assert all(map(torch.equal, outputs, copies))


@each_architecture
def test_five_tiles_do_not_pay_for_eight(manager: EncoderCudaGraphManager) -> None:
    config, tile = manager.config, manager.adapter.kinds[DEFAULT_PATH].tokens
    budgets = resolve_budgets(
        CompilationFields(),
        EncoderCgSettings(),
        manager.adapter.budget_range(),
        config.paths,
        config.max_frames_per_video,
        video_limit=None,
    ).path_budgets[DEFAULT_PATH]
    assert set(budgets) >= {tiles * tile for tiles in range(1, 9)}
    assert all(budget % tile == 0 for budget in budgets)


def test_a_budget_between_two_numbers_of_tiles_is_kept(encoders: Encoders) -> None:
    adapter = encoders.get(LLAMA4).manager.adapter
    kinds = {DEFAULT_PATH: dataclasses.replace(adapter.kinds[DEFAULT_PATH], tokens=144)}
    levels = fine_levels(144, 8192, granularity=144)
    assert levels[-1] == 8192 and all(level % 144 == 0 for level in levels[:-1])
    limits = BatchLimits(max_items=8, max_frames=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "_kinds", kinds)
        capacities = [
            adapter.capacity(GraphKey(DEFAULT_PATH, level), limits) for level in levels
        ]
    assert [c.tokens for c in capacities] == [*levels[:-1], 57 * 144]
    assert {c.items for c in capacities} == {8}


@each_architecture
def test_config(architecture: str, manager: EncoderCudaGraphManager) -> None:
    tile = manager.adapter.kinds[DEFAULT_PATH].tokens
    assert manager.adapter.architectures == (architecture,)
    assert manager.config.paths == {
        DEFAULT_PATH: EncoderCudaGraphPathConfig(tile, token_granularity=tile)
    }
    assert manager.supports_modality("video") == (architecture == INTERNVL)
    assert manager.adapter.backend_name() == "TORCH_SDPA"


@each_architecture
def test_forward_can_be_captured(manager: EncoderCudaGraphManager) -> None:
    kind = manager.adapter.kinds[DEFAULT_PATH]
    pixels = torch.randn(2, 3, kind.side, kind.side)
    with torch.inference_mode(), NoHostAccess():
        manager.adapter.encode(pixels, DEFAULT_PATH)


@each_architecture
@pytest.mark.parametrize(
    "change",
    [
        lambda pixels, counts: (pixels[:-1], counts),
        lambda pixels, counts: (pixels, counts + 1),
        lambda pixels, counts: (pixels, counts * torch.tensor([1, -1])),
        lambda pixels, counts: (pixels[..., :-1], counts),
        lambda pixels, counts: (pixels[:, :2], counts),
        lambda pixels, counts: (list(pixels), counts),
        lambda pixels, counts: (None, counts),
        lambda pixels, counts: (pixels, None),
    ],
    ids=["few tiles", "counts", "negative", "size", "channels", "list", "none", "no n"],
)
def test_contradicting_inputs_go_to_the_model(
    change: Any, manager: EncoderCudaGraphManager
) -> None:
    mm_kwargs = batch(manager, 2, 3)
    pixel_key, count_key = (
        keys["image"]
        for keys in (manager.adapter.pixel_keys, manager.adapter.count_keys)
    )
    assert manager.execute(mm_kwargs) is not None
    pixels, counts = change(mm_kwargs[pixel_key], mm_kwargs[count_key])
    assert manager.execute(mm_kwargs | {pixel_key: pixels, count_key: counts}) is None


@each_architecture
def test_embeddings_and_nothing_go_to_the_model(
    manager: EncoderCudaGraphManager,
) -> None:
    embeds = torch.randn(1, 4, manager.config.out_hidden_size)
    assert manager.execute({"image_embeds": embeds}) is None
    assert manager.execute({}) is None


def test_both_modalities_at_once_go_to_the_model(encoders: Encoders) -> None:
    manager = encoders.get(INTERNVL).manager
    generator = torch.Generator().manual_seed(0)
    video = manager.adapter.random_videos([2], generator)
    assert manager.execute(batch(manager, 1) | video) is None


def test_internvl_does_not_shard_a_second_time(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import intern_vit

    def shard(*_: Any) -> None:
        raise AssertionError("a collective inside the encoder")

    manager = encoders.get(INTERNVL).manager
    mm_kwargs = batch(manager, 70, 1, 2)  # the first is above every budget
    expected = eager_embeddings(manager.model, mm_kwargs)
    monkeypatch.setattr(intern_vit, "run_dp_sharded_vision_model", shard)
    monkeypatch.setattr(manager.model.vision_model, "use_data_parallel", True)
    outputs = manager.execute(mm_kwargs)
    assert outputs is not None
    errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
    assert max(errors) < TOLERANCE


def test_llama4_is_refused_where_its_projector_communicates(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = encoders.get(LLAMA4).manager.adapter
    monkeypatch.setattr(adapter.model, "use_data_parallel", True)
    assert adapter.unsupported_reason() is None  # a single rank
    parallel = adapter.vllm_config.parallel_config
    monkeypatch.setattr(parallel, "tensor_parallel_size", 2)
    reason = adapter.unsupported_reason()
    assert reason is not None and '--mm-encoder-tp-mode is "data"' in reason


@each_architecture
def test_a_missing_tower_is_refused(
    manager: EncoderCudaGraphManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager.adapter, "tower", None)
    reason = manager.adapter.unsupported_reason()
    assert reason is not None and "not loaded" in reason
