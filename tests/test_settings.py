# SPDX-License-Identifier: Apache-2.0
"""What a user may set, and what is said about what they may not."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_encoder_cg.settings import (
    CompilationFields,
    EncoderCgSettings,
    warn_of_duplicates,
)

BUDGETS = "encoder_cudagraph_token_budgets"
ITEMS = "encoder_cudagraph_max_vision_items_per_batch"
FRAMES = "encoder_cudagraph_max_frames_per_batch"


def read(options: Any) -> EncoderCgSettings:
    return EncoderCgSettings.from_additional_config({"encoder_cg": options})


def fields(**values: Any) -> CompilationFields:
    return CompilationFields.from_compilation_config(SimpleNamespace(**values))


@pytest.mark.parametrize(
    "additional_config",
    [None, {}, {"other_plugin": 1}, {"encoder_cg": None}, {"encoder_cg": {}}, object()],
    ids=["none", "empty", "other", "null", "no options", "platform object"],
)
def test_no_options_are_the_defaults(additional_config: Any) -> None:
    settings = EncoderCgSettings.from_additional_config(additional_config)
    assert settings == EncoderCgSettings()


def test_defaults() -> None:
    assert EncoderCgSettings().model_dump() == {
        "ladder": "fine",
        "max_graphs": 64,
        "memory_limit_gib": 3.9,
        "self_check": True,
        "on_mismatch": "drop",
        "log_every_items": 1000,
        "cost_model": True,
        "trace_file": None,
        "trace_max_mib": 16,
        "cost_file": None,
        "fused": "auto",
    }


@given(
    st.builds(
        EncoderCgSettings,
        ladder=st.sampled_from(["fine", "power_of_two"]),
        max_graphs=st.integers(1, 1000),
        memory_limit_gib=st.none() | st.floats(0.01, 1e4) | st.integers(1, 100),
        self_check=st.booleans(),
        on_mismatch=st.sampled_from(["drop", "raise"]),
        log_every_items=st.integers(0, 10**6),
        cost_model=st.booleans(),
        fused=st.sampled_from(["auto", "on", "off"]),
        trace_file=st.none() | st.text(min_size=1),
        trace_max_mib=st.integers(1, 10**6),
    )
)
def test_settings_survive_a_round_trip(settings: EncoderCgSettings) -> None:
    assert read(settings.model_dump()) == settings
    assert EncoderCgSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("ladder", "coarse", '"fine" or "power_of_two"'),
        ("ladder", 2, '"fine" or "power_of_two"'),
        ("max_graphs", 0, "an integer of at least 1"),
        ("max_graphs", "64", "an integer of at least 1"),
        ("max_graphs", True, "an integer of at least 1"),
        ("max_graphs", 1.5, "an integer of at least 1"),
        ("max_graphs", None, "an integer of at least 1"),
        ("memory_limit_gib", 0, "a number above 0, or null"),
        ("memory_limit_gib", -1.0, "a number above 0, or null"),
        ("memory_limit_gib", math.inf, "a number above 0, or null"),
        ("memory_limit_gib", math.nan, "a number above 0, or null"),
        ("memory_limit_gib", "8GiB", "a number above 0, or null"),
        ("self_check", "yes", "true or false"),
        ("self_check", 1, "true or false"),
        ("on_mismatch", "ignore", '"drop" or "raise"'),
        ("log_every_items", -1, "an integer of at least 0"),
        ("cost_model", None, "true or false"),
        ("fused", True, '"auto", "on" or "off"'),
        ("fused", "always", '"auto", "on" or "off"'),
        ("trace_file", "", "a path in a folder that exists"),
        ("trace_file", True, "a path in a folder that exists"),
        ("trace_max_mib", 0, "an integer of at least 1"),
    ],
)
def test_a_refused_value_is_named_with_its_remedy(
    name: str, value: Any, remedy: str
) -> None:
    with pytest.raises(ValueError) as caught:
        read({name: value})
    assert not isinstance(caught.value, ValidationError)
    message = str(caught.value)
    assert message.startswith(f"additional_config.encoder_cg.{name}: got {value!r};")
    assert remedy in message
    assert "pydantic" not in message


def test_every_option_has_a_description_and_a_remedy() -> None:
    for name, info in EncoderCgSettings.model_fields.items():
        assert info.description, name
        with pytest.raises(ValueError, match=f"encoder_cg.{name}: got .*; use "):
            read({name: object()})


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [("max_graph", "max_graphs"), ("selfcheck", "self_check"), ("zzz", None)],
)
def test_an_unknown_option_is_answered_with_the_known_ones(
    unknown: str, nearest: str | None
) -> None:
    with pytest.raises(ValueError) as caught:
        read({unknown: 7})
    message = str(caught.value)
    assert f"additional_config.encoder_cg.{unknown}: unknown option, got 7" in message
    assert all(name in message for name in EncoderCgSettings.model_fields)
    assert (f"did you mean {nearest!r}?" in message) == (nearest is not None)
    assert ("did you mean" in message) == (nearest is not None)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        read({"ladder": "x", "max_graphs": -1, "typo": 0})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "key", ["encoder-cg", "encodercg", "ENCODER_CG", "encoder_cgs", "vllm_encoder_cg"]
)
def test_a_key_that_is_nearly_ours_is_refused(key: str) -> None:
    with pytest.raises(ValueError) as caught:
        EncoderCgSettings.from_additional_config({key: {"max_graphs": 3}})
    assert f"additional_config.{key}: unknown key" in str(caught.value)
    assert "did you mean 'encoder_cg'?" in str(caught.value)


@pytest.mark.parametrize("name", EncoderCgSettings.model_fields)
def test_an_option_outside_of_our_key_is_refused(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        EncoderCgSettings.from_additional_config({"encoder_cg": {}, name: 3})
    assert str(caught.value).startswith(f"additional_config.{name}: got 3, an option")
    assert f'{{"encoder_cg": {{"{name}": ...}}}}' in str(caught.value)


@pytest.mark.parametrize("key", ["encoder", "encoder_config", "decoder", "", 7, None])
def test_keys_of_others_are_left_alone(key: Any) -> None:
    read = EncoderCgSettings.from_additional_config({key: {"max_graphs": 3}})
    assert read == EncoderCgSettings()


@pytest.mark.parametrize("options", [True, "fine", ["ladder"], 3])
def test_options_must_be_an_object(options: Any) -> None:
    with pytest.raises(ValueError, match=r"additional_config\.encoder_cg: got"):
        read(options)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        EncoderCgSettings().max_graphs = 2  # type: ignore[misc]


def test_compilation_fields_that_are_absent_are_inferred() -> None:
    assert fields() == CompilationFields((), 0, None)


def test_compilation_fields_are_read() -> None:
    given_fields = {
        "cudagraph_mm_encoder": True,
        BUDGETS: [2048, 512],
        ITEMS: 8,
        FRAMES: 64,
    }
    assert fields(**given_fields) == CompilationFields((512, 2048), 8, 64)


def test_duplicate_budgets_are_left_out_and_reported(
    package_log: pytest.LogCaptureFixture,
) -> None:
    given = {BUDGETS: [64, 128, 64]}
    assert fields(**given).token_budgets == (64, 128)
    assert package_log.records == []  # it is read more than once
    warn_of_duplicates(SimpleNamespace(**given))
    (record,) = package_log.records
    assert record.levelno == logging.WARNING
    assert BUDGETS in record.getMessage()
    assert "[64]" in record.getMessage()


def test_distinct_budgets_are_not_reported(
    package_log: pytest.LogCaptureFixture,
) -> None:
    assert fields(**{BUDGETS: (128, 64)}).token_budgets == (64, 128)
    warn_of_duplicates(SimpleNamespace(**{BUDGETS: (128, 64)}))
    warn_of_duplicates(SimpleNamespace())
    assert not package_log.records


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        (BUDGETS, [64, 0], "0"),
        (BUDGETS, [-64], "-64"),
        (BUDGETS, [True], "True"),
        (BUDGETS, ["64"], "'64'"),
        (BUDGETS, [64.0], "64.0"),
        (BUDGETS, [None], "None"),
        (BUDGETS, 64, "64"),
        (BUDGETS, "64", "'64'"),
        (BUDGETS, {64: 1}, "{64: 1}"),
        (ITEMS, -1, "-1"),
        (ITEMS, True, "True"),
        (ITEMS, "8", "'8'"),
        (ITEMS, 8.0, "8.0"),
        (FRAMES, -1, "-1"),
        (FRAMES, False, "False"),
        (FRAMES, "all", "'all'"),
        ("cudagraph_mm_encoder", "true", "'true'"),
        ("cudagraph_mm_encoder", 1, "1"),
    ],
)
def test_a_refused_compilation_field_is_named(
    name: str, value: Any, shown: str
) -> None:
    with pytest.raises(ValueError) as caught:
        fields(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: got {shown}")
    assert ";" in message
