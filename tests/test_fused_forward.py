# SPDX-License-Identifier: Apache-2.0
"""Fused forwards equal vLLM's, and are used only where they are known to fit and
measured to be faster.

The other packed towers are compared in ``test_packed_towers.py``, the kernels in
``test_kernels.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.encoders import SETTINGS, Encoders, cases
from tests.support.fused import counted_calls, fused
from tests.support.toy_adapter import ToyAdapter
from vllm_encoder_cg.adapter import GraphShape
from vllm_encoder_cg.buffers import BufferArena
from vllm_encoder_cg.definitions import BatchLimits, GraphCapacity, GraphKey
from vllm_encoder_cg.kernels import short_rows
from vllm_encoder_cg.models.fused.internvl import FusedInternEncoder
from vllm_encoder_cg.models.fused.minicpmv import FusedIdefics2Encoder
from vllm_encoder_cg.models.fused.modules import Activation, FusionRefusedError
from vllm_encoder_cg.models.fused.qwen3_vl import FusedQwen3Vision
from vllm_encoder_cg.ranks import EncoderMode, EncoderRanks
from vllm_encoder_cg.samples.architectures import ARCHITECTURES
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.samples.encoder_inputs import image_batch
from vllm_encoder_cg.startup import forward_choice
from vllm_encoder_cg.startup.forward_choice import choose_forward
from vllm_encoder_cg.startup.rounding import relative_norm
from vllm_encoder_cg.verification import Verifier
from vllm_encoder_cg.verification_cases import Case

QWEN3, INTERNVL = "Qwen3VLForConditionalGeneration", "InternVLChatModel"
GEMMA3 = "Gemma3ForConditionalGeneration"
MINICPMV = ("MiniCPMV2_5", "MiniCPMV2_6", "MiniCPMV4_0", "MiniCPMV4_5")
TOLERANCE = 1e-4


@pytest.fixture
def qwen3(encoders: Encoders) -> Verifier:
    return encoders.get(QWEN3)


@pytest.fixture
def tower(qwen3: Verifier) -> Any:
    return qwen3.manager.adapter.tower  # type: ignore[attr-defined]


def error_of_forward(verifier: Verifier) -> float:
    """Of the fused forward in the smallest graph, against eager; without replaying
    graphs, which do not survive that a module is replaced."""
    manager = verifier.manager
    shape = min(manager._shapes, key=lambda shape: shape.key.token_budget)
    buffers = manager.adapter.capture_buffers(shape, BufferArena(manager.device))
    batch = manager.adapter.parse(manager.adapter.sample(shape, seed=0) or {})
    assert batch is not None
    with torch.inference_mode():
        expected = manager.adapter.eager(batch, range(len(batch.specs)))
        with fused(manager.adapter):
            result = manager.adapter.forward(buffers, shape)
    return relative_norm(result[: len(expected)], expected)


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        pytest.param(architecture, case, id=f"{architecture}-{case.name}")
        for architecture in (QWEN3, INTERNVL, GEMMA3, *MINICPMV)
        for case in cases(ARCHITECTURES[architecture].modalities)
    ],
)
def test_equals_eager(architecture: str, case: Case, encoders: Encoders) -> None:
    verifier = encoders.get(architecture)
    with fused(verifier.manager.adapter):
        result = verifier.run(case)
    assert result.problems == []
    assert result.error < TOLERANCE
    assert result.hits > 0 and result.eager == 0


def test_a_fused_graph_runs_none_of_vllms_blocks(qwen3: Verifier, tower: Any) -> None:
    manager = qwen3.manager
    mm_kwargs = image_batch(manager.adapter, [(128, 64), (96, 128)], seed=5)
    with fused(manager.adapter), counted_calls(tower.blocks[0].attn) as calls:
        manager.execute(mm_kwargs)
    assert not calls
    with counted_calls(tower.blocks[0].attn) as calls:
        manager.execute(mm_kwargs)
    assert calls


def test_linears_that_are_wrapped_keep_their_own_forward(
    qwen3: Verifier, tower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LoRA wraps them."""

    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            output = self.inner(x)
            if isinstance(output, tuple):
                return 1.5 * output[0], output[1]
            return 1.5 * output

    block = tower.blocks[0]
    for module, name in (
        (block.attn, "qkv"),
        (block.attn, "proj"),
        (block.mlp, "linear_fc1"),
    ):
        monkeypatch.setitem(module._modules, name, Wrapped(getattr(module, name)))
    monkeypatch.setattr(qwen3.manager.adapter, "_fused", FusedQwen3Vision(tower))
    assert error_of_forward(qwen3) < TOLERANCE


def test_a_norm_that_is_not_known_is_called(
    qwen3: Verifier, tower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled(torch.nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    norm = Doubled(tower.hidden_size)
    monkeypatch.setitem(tower.blocks[0]._modules, "norm2", norm)
    monkeypatch.setattr(qwen3.manager.adapter, "_fused", FusedQwen3Vision(tower))
    assert error_of_forward(qwen3) < TOLERANCE


def test_modules_that_are_not_known_are_refused_by_name(
    tower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = tower.blocks[0]
    changed = type("ChangedBlock", (type(block),), {})
    with monkeypatch.context() as patch:
        patch.setattr(block, "__class__", changed)
        with pytest.raises(FusionRefusedError, match="a ChangedBlock where a Qwen3_Vi"):
            FusedQwen3Vision(tower)
    with counted_calls(block.attn), pytest.raises(FusionRefusedError, match="hooks"):
        FusedQwen3Vision(tower)
    with pytest.raises(FusionRefusedError, match="InternVisionModel is known"):
        FusedInternEncoder(tower)
    assert FusedQwen3Vision(tower)


def test_a_forward_of_its_own_is_seen(
    qwen3: Verifier, tower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some libraries set it on the instance."""
    block, norm = tower.blocks[0], tower.blocks[0].norm2
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: 2 * forward(x))
    monkeypatch.setattr(qwen3.manager.adapter, "_fused", FusedQwen3Vision(tower))
    assert error_of_forward(qwen3) < TOLERANCE
    monkeypatch.setattr(block.attn, "forward", block.attn.forward)
    with pytest.raises(FusionRefusedError, match="another forward"):
        FusedQwen3Vision(tower)


def test_an_activation_of_a_known_name_is_not_enough() -> None:
    class QuickGELU(torch.nn.SiLU):
        pass

    assert Activation(QuickGELU()).kind is None
    assert Activation(torch.nn.GELU(approximate="tanh")).kind == "gelu_tanh"


def test_attention_that_vllm_leaves_out_has_to_be_known(encoders: Encoders) -> None:
    tower = encoders.get("MiniCPMV4_5").manager.model.vpm
    assert FusedIdefics2Encoder(tower)
    attention = tower.encoder.layers[-1].self_attn.attn
    with counted_calls(attention), pytest.raises(FusionRefusedError, match="hooks"):
        FusedIdefics2Encoder(tower)


def test_a_module_that_is_wrapped_between_captures_is_seen(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    with captured_encoder(
        EncoderOptions(architecture=GEMMA3, settings=SETTINGS | {"fused": "on"})
    ) as manager:
        assert manager.adapter.fused
        mlp = manager.model.vision_tower.vision_model.encoder.layers[0].mlp
        with counted_calls(mlp):
            manager.capture()
            assert not manager.adapter.fused and manager.is_captured()
        manager.capture()
        assert manager.adapter.fused and manager.is_captured()


# -- The choice ---------------------------------------------------------------------


def shapes(*budgets: int) -> list[GraphShape]:
    return [
        GraphShape(GraphKey("default", budget), GraphCapacity(budget, 4))
        for budget in budgets
    ]


def choose(adapter: Any, setting: str, device: str = "cuda") -> bool:
    choose_forward(
        adapter,
        shapes(16384, 4096, 1024, 256, 64),
        BatchLimits(4, 4),
        torch.device(device),
        EncoderRanks(EncoderMode.SINGLE),
        setting,
    )
    return adapter.fused


def fusable(reason: str | None = None) -> Any:
    return SimpleNamespace(fused=True, fusion_refusal=lambda: reason)


def test_off_and_a_refusal_leave_vllms_forward() -> None:
    assert not choose(fusable(), "off")
    assert not choose(fusable("no kernels"), "on")
    assert not choose(fusable("no kernels"), "auto")
    assert choose(fusable(), "on")


def test_an_adapter_has_no_fused_forward_unless_it_says_so() -> None:
    assert "ToyAdapter" in str(
        ToyAdapter.fusion_refusal(ToyAdapter.__new__(ToyAdapter))
    )


def test_auto_changes_nothing_where_there_is_no_gpu() -> None:
    assert not choose(fusable(), "auto", "cpu")


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.9, 0.95, 0.99], True),
        ([0.8, 1.01, 1.0], True),
        ([0.5, 0.9, 1.05], False),
        ([1.0, 1.01, 1.0], False),
        ([], False),
    ],
)
def test_auto_takes_what_is_faster_and_nowhere_much_slower(
    ratios: list[float], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[GraphShape] = []

    def compare(adapter: Any, few: list[GraphShape], *others: Any) -> Any:
        measured.extend(few)
        return {shape.key: r for shape, r in zip(few, ratios, strict=False)}

    monkeypatch.setattr(forward_choice, "_compare", compare)
    assert choose(fusable(), "auto") == expected
    # Large first, as graphs are captured; beyond 2048 tokens nothing changes.
    assert [shape.key.token_budget for shape in measured] == [1024, 256, 64]


def test_graphs_are_timed_on_tables_of_their_own(
    qwen3: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full ones: what the check leaves is one item alone."""
    manager = qwen3.manager
    adapter: Any = manager.adapter
    assert adapter.fusion_refusal() is None
    shapes = manager._shapes[-3:]
    rows: list[int] = []

    def ratio(fused_replay: Any, plain_replay: Any) -> float:
        batch = adapter.parse(adapter.cost_sample(shapes[len(rows)]))
        expected = adapter.eager(batch, range(len(batch.specs)))
        for replay in (fused_replay, plain_replay):
            replay()
            output = replay.__self__._output[: len(expected)]
            assert relative_norm(output, expected) < TOLERANCE
        rows.append(len(expected))
        return 0.5

    monkeypatch.setattr(forward_choice, "_ratio", ratio)
    try:
        forward_choice._compare(
            adapter,
            shapes,
            manager.budgets.limits,
            manager.device,
            EncoderRanks(EncoderMode.SINGLE),
        )
    finally:
        adapter.fused = False
    assert len(set(rows)) == 3


def test_a_fused_forward_that_is_wrong_or_fails_is_not_used(
    qwen3: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = qwen3.manager
    adapter: Any = manager.adapter
    monkeypatch.setattr(forward_choice, "_ratio", lambda first, second: 0.5)

    def compare() -> dict[GraphKey, float]:
        try:
            return forward_choice._compare(
                adapter,
                manager._shapes[-2:],
                manager.budgets.limits,
                manager.device,
                EncoderRanks(EncoderMode.SINGLE),
            )
        finally:
            adapter.fused = False

    assert adapter.fusion_refusal() is None
    assert set(compare().values()) == {0.5}
    right = adapter._fused

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        return right(*args, **kwargs) * 1.1

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("out of registers")

    for broken in (wrong, failing):
        monkeypatch.setattr(adapter, "_fused", broken)
        assert compare() == {}


# -- Attention in one kernel --------------------------------------------------------


@pytest.mark.parametrize(
    ("faster_up_to", "expected"), [(0, 0), (300, 256), (1024, 1024), (4096, 2048)]
)
def test_one_kernel_attends_as_far_as_it_is_faster(
    faster_up_to: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = SimpleNamespace(num_heads=2, head_size=8, dtype=torch.float32)
    device, calls = torch.device("cpu"), []

    def make_attend(rows: int, short: bool) -> Any:
        def attend(packed: torch.Tensor, cos: Any, sin: Any) -> torch.Tensor:
            assert packed.shape == (rows, 48) and cos.shape == sin.shape == (rows, 4)
            calls.append(rows)
            return torch.tensor(rows if short else faster_up_to + 0.5)

        return attend

    monkeypatch.setattr(short_rows, "_known", {})
    monkeypatch.setattr(short_rows, "_time", lambda device, call: float(call()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    guess = short_rows.short_rows(layer, device, make_attend)
    assert guess == 512 and not calls
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(2):
        assert short_rows.short_rows(layer, device, make_attend) == expected
    # Once, and no further than it has to.
    assert len(calls) <= 2 * 4 and len(set(calls)) == len(calls) // 2


def test_graphs_of_equal_size_class_attend_alike() -> None:
    for limit in (0, 256, 512, 1024, 2048):
        kinds: dict[int, set[bool]] = {}
        for rows in range(4, 4096, 4):
            kinds.setdefault(short_rows.size_class(rows), set()).add(rows <= limit)
        assert all(len(found) == 1 for found in kinds.values())


def test_a_gpu_that_cannot_measure_leaves_attention_to_its_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> float:
        raise RuntimeError("out of memory")

    layer = SimpleNamespace(num_heads=2, head_size=8, dtype=torch.float32)
    monkeypatch.setattr(short_rows, "_known", {})
    monkeypatch.setattr(short_rows, "_time", fail)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found = short_rows.short_rows(layer, torch.device("cpu"), lambda rows, short: fail)
    assert found == 0
