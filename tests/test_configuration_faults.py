# SPDX-License-Identifier: Apache-2.0
"""Whatever is configured: refused at start-up in words, or it works.

A user relies on a wrong value being named with its remedy, before a model is
captured, and on everything that is accepted being captured and right.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.small_encoders import SmallEncoders, ordinary_images
from tests.support.variants import make_variant
from vllm_encoder_cg.settings import CompilationFields, EncoderCgSettings
from vllm_encoder_cg.startup.rounding import relative_norm

BUDGETS = "encoder_cudagraph_token_budgets"
ITEMS = "encoder_cudagraph_max_vision_items_per_batch"
FRAMES = "encoder_cudagraph_max_frames_per_batch"
COMPILATION_FIELDS = ("cudagraph_mm_encoder", BUDGETS, ITEMS, FRAMES)
OPTIONS = list(EncoderCgSettings.model_fields)

#: What JSON on a command line may hold.
_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["fine", "drop", "raise", "auto", "on", "0", "null"])
)
anything = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(OPTIONS), anything, max_size=4))
def test_every_option_takes_a_value_or_names_it(options: dict[str, Any]) -> None:
    try:
        read = EncoderCgSettings.from_additional_config({"encoder_cg": options})
    except ValueError as error:
        lines = str(error).splitlines()
        named = [name for name in options if f"encoder_cg.{name}: got" in str(error)]
        assert named
        for name in named:
            assert repr(options[name]) in str(error)
        assert all("; use " in line for line in lines if line.startswith("additional"))
    else:
        for name, value in options.items():
            assert getattr(read, name) == value


@given(anything)
def test_options_of_any_form(value: Any) -> None:
    try:
        EncoderCgSettings.from_additional_config({"encoder_cg": value})
    except ValueError as error:
        assert str(error).startswith("additional_config.encoder_cg")
        assert "use " in str(error) or "known options are" in str(error)


@given(st.sampled_from(COMPILATION_FIELDS), anything)
def test_every_compilation_field_takes_a_value_or_names_it(
    name: str, value: Any
) -> None:
    try:
        CompilationFields.from_compilation_config(SimpleNamespace(**{name: value}))
    except ValueError as error:
        message = str(error)
        assert message.startswith(f"{name}: got ")
        assert "; use " in message or "every budget is" in message


def fields(budgets: Any, items: Any, frames: Any) -> dict[str, Any]:
    return {BUDGETS: budgets, ITEMS: items, FRAMES: frames}


compilation = st.builds(
    fields,
    st.lists(st.integers(1, 200), max_size=3) | st.lists(st.integers(-1, 40)),
    st.integers(-1, 5),
    st.none() | st.integers(-1, 12),
)
options = st.fixed_dictionaries(
    {},
    optional={
        "ladder": st.sampled_from(["fine", "power_of_two"]),
        "max_graphs": st.integers(0, 4),
        "memory_limit_gib": st.sampled_from([None, -0.1, 0, 1, 2.5]),
        "log_every_items": st.integers(-1, 3),
        "self_check": st.booleans(),
        "cost_model": st.booleans(),
        "fused": st.sampled_from(["auto", "on", "off"]),
    },
)


@pytest.mark.parametrize(
    "architecture",
    ["Gemma3ForConditionalGeneration", "Qwen2VLForConditionalGeneration"],
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(compilation=compilation, options=options)
def test_what_is_accepted_is_captured(
    architecture: str,
    small_encoders: SmallEncoders,
    compilation: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Each graph that was announced, and right."""
    base = small_encoders.get(architecture)
    with pytest.MonkeyPatch.context() as patch:
        config = base.vllm_config.compilation_config
        for name in (ITEMS, FRAMES):
            patch.setattr(config, name, compilation[name])
        try:
            manager = make_variant(
                base,
                patch,
                budgets=compilation[BUDGETS],
                on_mismatch="raise",
                **options,
            )
        except ValueError as error:
            names = (*COMPILATION_FIELDS, *OPTIONS)
            assert any(name in str(error) for name in names)
            return
        manager.capture()
    stats = manager.get_cumulative_stats()
    assert stats["dropped_graphs"] == []
    assert stats["num_budgets"] == manager.get_num_graphs_to_capture() > 0
    outputs = manager.execute(ordinary_images(manager))
    if outputs is not None:  # not above every budget
        expected = small_encoders.expected(architecture)
        errors = [relative_norm(a, b) for a, b in zip(outputs, expected, strict=True)]
        assert max(errors) < 1e-4
    manager.clear()


@pytest.mark.parametrize("huge", [10**7, 2**40, 2**70])
@pytest.mark.parametrize(
    "architecture",
    ["Gemma4ForConditionalGeneration", "Qwen2VLForConditionalGeneration"],
)
def test_huge_limits_start_at_once(
    architecture: str,
    huge: int,
    small_encoders: SmallEncoders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Budgets that no batch can fill, and frames without end."""
    base = small_encoders.get(architecture)
    config = base.vllm_config.compilation_config
    monkeypatch.setattr(config, FRAMES, huge)
    manager = make_variant(base, monkeypatch, budgets=(64, huge), cost_model=False)
    assert manager.token_budgets == [64, 256]
    manager.capture()
    assert manager.get_cumulative_stats()["dropped_graphs"] == []
    outputs = manager.execute(ordinary_images(manager))
    assert outputs is not None
    expected = small_encoders.expected(architecture)
    assert max(map(relative_norm, outputs, expected)) < 1e-4
