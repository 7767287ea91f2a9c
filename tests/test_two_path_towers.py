# SPDX-License-Identifier: Apache-2.0
"""Step3-VL, DeepSeek-OCR: both paths, by graph or eagerly, equal vLLM's own."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tests.support.host_reads import NoHostAccess
from tests.support.small_towers import small_deepseek_ocr
from vllm_encoder_cg.adapter import EncoderBatch
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.tiled_tower import Grid
from vllm_encoder_cg.models.two_path_tower import GLOBAL, LOCAL
from vllm_encoder_cg.planning.planner import Plan
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import eager_embeddings

STEP3 = "Step3VLForConditionalGeneration"
DEEPSEEK = "DeepseekOCRForCausalLM"
TOLERANCE = 1e-4

#: Graphs for 2 and 3 whole images, and for 5 and 7, or 6 and 9, crops.
#: DeepSeek-OCR's images are half as wide as real ones.
BUDGETS = {STEP3: (338, 507), DEEPSEEK: (144, 216)}
MOST_CROPS = {STEP3: 7, DEEPSEEK: 9}
TOO_MANY: Grid = (2, 5)
WHOLE: Grid = (1, 1)


@pytest.fixture(scope="module")
def managers() -> Iterator[dict[str, EncoderCudaGraphManager]]:
    with ExitStack() as stack:
        with small_deepseek_ocr(base_size=512, image_size=320):
            built = {
                name: stack.enter_context(
                    captured_encoder(
                        EncoderOptions(
                            architecture=name,
                            budgets=BUDGETS[name],
                            max_tokens=BUDGETS[name][-1],
                            settings={"cost_model": False},
                        )
                    )
                )
                for name in BUDGETS
            }
        yield built


@pytest.fixture(params=[STEP3, DEEPSEEK])
def manager(
    request: pytest.FixtureRequest, managers: dict[str, EncoderCudaGraphManager]
) -> EncoderCudaGraphManager:
    return managers[request.param]


def batch(
    manager: EncoderCudaGraphManager, *grids: Grid, seed: int = 0
) -> dict[str, Any]:
    """Inputs of images cut into (columns, rows)."""
    generator = torch.Generator().manual_seed(seed)
    return manager.adapter.random_images(grids, generator)


def run(
    manager: EncoderCudaGraphManager, *grids: Grid, seed: int = 0
) -> tuple[Plan, list[torch.Tensor] | None]:
    """Encodes a batch over NaN and compares it with vLLM's own."""
    mm_kwargs = batch(manager, *grids, seed=seed)
    seen: list[tuple[EncoderBatch, Plan]] = []
    manager.observer = lambda batch, plan, _: seen.append((batch, plan))
    manager.poison_buffers()
    outputs = manager.execute(mm_kwargs)
    ((parsed, plan),) = seen
    expected = eager_embeddings(manager.model, mm_kwargs)
    assert [spec.output_tokens for spec in parsed.specs] == list(map(len, expected))
    if outputs is not None:
        errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
        assert max(errors) < TOLERANCE
    return plan, outputs


def steps(plan: Plan) -> list[dict[str, int | EagerReason | None]]:
    """Per sub-batch and path, the budget or why it is eager."""
    return [
        {path: step.key.token_budget if step.key else step.eager for path, step in s}
        for s in (sub_batch.steps.items() for sub_batch in plan.sub_batches)
    ]


@contextmanager
def without(manager: EncoderCudaGraphManager, path: str) -> Iterator[None]:
    """The graphs of one path are dropped, as those that fail the self-check."""
    graphs = manager._graphs
    kept, dropped = dict(graphs.graphs), dict(graphs.dropped)
    for key in list(kept):
        if key.path == path:
            graphs.drop(key)
    manager._plan_anew()
    try:
        yield
    finally:
        graphs.graphs, graphs.dropped = kept, dropped
        manager._plan_anew()


def budgets(manager: EncoderCudaGraphManager) -> tuple[int, int]:
    small, large = manager.token_budgets
    return small, large


def test_paths_of_unlike_budgets(manager: EncoderCudaGraphManager) -> None:
    small, large = budgets(manager)
    kinds = manager.adapter.kinds
    assert manager.budgets.path_budgets == {
        GLOBAL: (small, large),
        LOCAL: (0, small, large),
    }
    assert manager.budgets.limits.max_items == 3
    assert manager.config.paths[LOCAL].allow_zero_tokens
    assert not manager.config.paths[GLOBAL].allow_zero_tokens
    for path, kind in kinds.items():
        assert manager.config.paths[path].min_token_budget == kind.tokens
        assert manager.config.paths[path].token_granularity == kind.tokens
    captured = {(key.path, key.token_budget) for key in manager._graphs.graphs}
    assert captured == set(itertools.product((GLOBAL, LOCAL), (small, large)))
    assert manager._graphs.dropped == {}


def test_token_counts(managers: dict[str, EncoderCudaGraphManager]) -> None:
    tokens = {
        name: {path: kind.tokens for path, kind in manager.adapter.tile_kinds().items()}
        for name, manager in managers.items()
    }
    assert tokens == {
        STEP3: {GLOBAL: 169, LOCAL: 81},
        DEEPSEEK: {GLOBAL: 272, LOCAL: 100},
    }


def test_both_paths_by_graph(manager: EncoderCudaGraphManager) -> None:
    small, large = budgets(manager)
    plan, _ = run(manager, (3, 1))
    assert steps(plan) == [{GLOBAL: small, LOCAL: small}]
    plan, _ = run(manager, (2, 1), (1, 3), (1, 2))
    assert steps(plan) == [{GLOBAL: large, LOCAL: large}]


def test_without_crops_the_local_path_is_skipped(
    manager: EncoderCudaGraphManager,
) -> None:
    small, large = budgets(manager)
    plan, _ = run(manager, WHOLE)
    assert steps(plan) == [{GLOBAL: small}]
    plan, _ = run(manager, WHOLE, WHOLE, WHOLE)
    assert steps(plan) == [{GLOBAL: large}]


def test_images_without_crops_among_images_with_many(
    manager: EncoderCudaGraphManager,
) -> None:
    small, large = budgets(manager)
    plan, _ = run(manager, WHOLE, (2, 3), WHOLE)
    (step,) = steps(plan)
    assert step[GLOBAL] == large and step[LOCAL] in (small, large)


def test_as_many_crops_as_fit(manager: EncoderCudaGraphManager) -> None:
    small, large = budgets(manager)
    most = MOST_CROPS[type(manager.model).__name__]
    plan, _ = run(manager, (most, 1))
    assert steps(plan) == [{GLOBAL: small, LOCAL: large}]
    plan, _ = run(manager, (1, most - 2), WHOLE, (2, 1))
    assert steps(plan) == [{GLOBAL: large, LOCAL: large}]
    # Together they have a crop too many.
    plan, _ = run(manager, (1, most - 1), (2, 1))
    assert len(plan.sub_batches) == 2
    assert all(isinstance(s[LOCAL], int) for s in steps(plan))


def test_too_many_crops_run_eagerly_and_the_whole_image_does_not(
    manager: EncoderCudaGraphManager,
) -> None:
    small, _ = budgets(manager)
    plan, _ = run(manager, TOO_MANY)
    assert steps(plan) == [{GLOBAL: small, LOCAL: EagerReason.ABOVE_EVERY_BUDGET}]
    plan, _ = run(manager, (2, 1), TOO_MANY, WHOLE)
    eager = {i: r for sub in plan.sub_batches for i, r in sub.eager_reasons.items()}
    assert eager == {1: EagerReason.ABOVE_EVERY_BUDGET}


def test_whole_images_eagerly_and_crops_by_graph(
    manager: EncoderCudaGraphManager,
) -> None:
    small, _ = budgets(manager)
    with without(manager, GLOBAL):
        plan, _ = run(manager, (3, 1), WHOLE, (1, 2))
        for_crops = [s for s in steps(plan) if LOCAL in s]
        assert for_crops == [{GLOBAL: EagerReason.DROPPED_GRAPH, LOCAL: small}]
        plan, outputs = run(manager, WHOLE)
        assert outputs is None and steps(plan) == [{GLOBAL: EagerReason.DROPPED_GRAPH}]


def test_crops_eagerly_and_whole_images_by_graph(
    manager: EncoderCudaGraphManager,
) -> None:
    small, _ = budgets(manager)
    with without(manager, LOCAL):
        plan, _ = run(manager, (3, 1), (2, 1))
        assert steps(plan) == [{GLOBAL: small, LOCAL: EagerReason.DROPPED_GRAPH}]


def test_more_items_than_a_replay_takes(manager: EncoderCudaGraphManager) -> None:
    plan, _ = run(manager, WHOLE, (2, 1), WHOLE, WHOLE, WHOLE)
    assert sorted(len(sub.indices) for sub in plan.sub_batches) == [2, 3]
    assert not any(sub.eager_reasons for sub in plan.sub_batches)


def test_random_batches(manager: EncoderCudaGraphManager) -> None:
    generator = random.Random(1)
    grids = [WHOLE, WHOLE, (2, 1), (1, 2), (1, 3), (2, 2), (3, 2), TOO_MANY]
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed in range(4):
        _, outputs = run(
            manager, *generator.choices(grids, k=generator.randint(1, 4)), seed=seed
        )
        assert all(torch.equal(output, copy) for output, copy in earlier)
        earlier += [(output, output.clone()) for output in outputs or ()]


def test_outputs_are_no_views_of_a_buffer(manager: EncoderCudaGraphManager) -> None:
    buffers = {
        graph.output_buffer.untyped_storage().data_ptr()
        for graph in manager._graphs.graphs.values()
    }
    for grids in [(WHOLE,), (WHOLE, WHOLE), ((2, 1), WHOLE)]:
        outputs = manager.execute(batch(manager, *grids))
        assert outputs is not None
        for output in outputs:
            assert output.untyped_storage().data_ptr() not in buffers


def test_forward_can_be_captured(manager: EncoderCudaGraphManager) -> None:
    for path, kind in manager.adapter.kinds.items():
        pixels = torch.randn(1, 3, kind.side, kind.side)
        with torch.inference_mode(), NoHostAccess():
            manager.adapter.encode(pixels, path)


GRIDS = [g for g in itertools.product(range(1, 7), repeat=2) if 2 <= g[0] * g[1] <= 9]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_grid_is_joined_as_vllm_joins_it(
    grid: Grid, managers: dict[str, EncoderCudaGraphManager]
) -> None:
    """Assembly alone, on random rows in place of the towers' outputs."""
    adapter, model = managers[DEEPSEEK].adapter, managers[DEEPSEEK].model
    parsed = adapter.parse(batch(managers[DEEPSEEK], WHOLE, grid, (2, 1)))
    assert parsed is not None
    indices = [1, 0, 2]
    width = adapter.out_hidden_size
    rows = {
        path: torch.randn(
            sum(parsed.specs[i].get_path_output_tokens(path) for i in indices), width
        )
        for path in (GLOBAL, LOCAL)
    }
    with torch.inference_mode():
        outputs = adapter.assemble(parsed, indices, rows)
        whole = rows[GLOBAL].view(3, -1, width)
        crops = rows[LOCAL].view(-1, adapter.kinds[LOCAL].tokens, width)
        separator = model.view_seperator[None]
        count = grid[0] * grid[1]
        expected = [
            model._assemble_patch_grid(crops[:count], torch.tensor(grid)),
            crops[:0].flatten(0, 1),
            model._assemble_patch_grid(crops[count:], torch.tensor((2, 1))),
        ]
        for output, of_crops, of_whole in zip(outputs, expected, whole, strict=True):
            assert torch.equal(output, torch.cat([of_crops, of_whole, separator]))


def changed(mm_kwargs: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return mm_kwargs | {key: value(mm_kwargs[key])}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pixel_values", lambda x: x[:1]),
        ("pixel_values", lambda x: x[..., :-8]),
        ("pixel_values", list),
        ("crops", lambda x: x[:-1]),
        ("crops", lambda x: x[..., :-8]),
        ("crops", lambda x: None),
        ("counts", lambda x: x[:1]),
        ("counts", lambda x: x + 1),
        ("counts", lambda x: -x),
        ("counts", lambda x: None),
    ],
)
def test_contradicting_inputs_go_to_the_model(
    key: str, value: Any, manager: EncoderCudaGraphManager
) -> None:
    mm_kwargs = batch(manager, WHOLE, (2, 2))
    names = {"pixel_values": "pixel_values"}
    names["crops"] = manager.adapter.kinds[LOCAL].buffer
    (names["counts"],) = mm_kwargs.keys() - names.values()
    assert manager.adapter.parse(mm_kwargs) is not None
    assert manager.execute(changed(mm_kwargs, names[key], value)) is None


def test_other_inputs_go_to_the_model(manager: EncoderCudaGraphManager) -> None:
    assert manager.execute({"image_embeds": torch.randn(1, 169, 8)}) is None
    assert manager.execute({}) is None


def test_other_sizes_of_deepseek_ocr_go_to_the_model(
    managers: dict[str, EncoderCudaGraphManager],
) -> None:
    """Its processor can be told to make smaller whole images."""
    mm_kwargs = batch(managers[DEEPSEEK], WHOLE)
    mm_kwargs["pixel_values"] = torch.randn(1, 3, 640, 640)
    assert managers[DEEPSEEK].execute(mm_kwargs) is None
    (output,) = eager_embeddings(managers[DEEPSEEK].model, mm_kwargs)
    assert len(output) == 10 * 11 + 1


def test_step3_does_not_shard_a_second_time(
    managers: dict[str, EncoderCudaGraphManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import step3_vl

    def shard(*_: Any) -> None:
        raise AssertionError("a collective inside the encoder")

    manager = managers[STEP3]
    mm_kwargs = batch(manager, (2, 1), TOO_MANY)  # the crops of the second: eagerly
    expected = eager_embeddings(manager.model, mm_kwargs)
    monkeypatch.setattr(step3_vl, "run_dp_sharded_vision_model", shard)
    monkeypatch.setattr(manager.model.vision_model, "use_data_parallel", True)
    outputs = manager.execute(mm_kwargs)
    assert outputs is not None
    errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize("items", [1, 2, 8])
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 12])
def test_sample_input_fills_a_graph(
    tiles: int, items: int, manager: EncoderCudaGraphManager
) -> None:
    adapter = manager.adapter
    shapes: Sequence[Any] = list(manager._graphs.shapes.values())
    local = next(shape for shape in shapes if shape.key.path == LOCAL)
    tokens = tiles * adapter.kinds[LOCAL].tokens
    capacity = dataclasses.replace(local.capacity, tokens=tokens, items=items)
    parsed = adapter.parse(
        adapter.sample(dataclasses.replace(local, capacity=capacity), seed=0)
    )
    assert parsed is not None
    counts = [spec.get_path_output_tokens(LOCAL) for spec in parsed.specs]
    assert sum(counts) == tokens and len(counts) <= items
