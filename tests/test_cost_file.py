# SPDX-License-Identifier: Apache-2.0
"""Measured costs in a file: read back as they were, or refused with a reason."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encoders import Encoders
from vllm_encoder_cg.definitions import GraphKey
from vllm_encoder_cg.planning.cost_file import (
    CostFile,
    CostFileError,
    MeasuredEncoder,
    read_costs,
    write_costs,
)
from vllm_encoder_cg.planning.costs import MeasuredCosts
from vllm_encoder_cg.planning.sharding import PathRate
from vllm_encoder_cg.ranks import EncoderMode, EncoderRanks
from vllm_encoder_cg.settings import EncoderCgSettings
from vllm_encoder_cg.startup import known_costs
from vllm_encoder_cg.startup.known_costs import (
    KnownCosts,
    identify,
    usable_cost_file,
)

RANKS = EncoderRanks(EncoderMode.SINGLE)
ENCODER = MeasuredEncoder(
    architecture="Model",
    encoder="abc",
    dtype="torch.bfloat16",
    backend="FLASH_ATTN",
    device="GPU",
    ranks=1,
    mode="single",
    forward="auto",
    vllm="0.33.0",
    package="0.1.0",
)
COSTS = MeasuredCosts(
    {
        GraphKey("default", 64): 2.0,
        GraphKey("default", 512): 5.5,
        GraphKey("other", 64, (8, ("a", 2))): 3.25,
    },
    {"default": {64: 14.0, 512: 15.0}},
)
RATES = {"default": PathRate(0.01, 1e-6)}


def make_file(costs: MeasuredCosts = COSTS) -> CostFile:
    return CostFile.of(
        ENCODER,
        costs,
        RATES,
        fused=True,
        graphs=3,
        largest_budget=512,
        memory_bytes=2**30,
    )


def test_read_back(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_file())
    content = read_costs(path)
    assert content == make_file()
    assert content.costs().replay_ms == COSTS.replay_ms
    assert content.costs().eager_ms == COSTS.eager_ms
    assert content.path_rates() == RATES
    assert content.differences(ENCODER) == []
    assert os.listdir(tmp_path) == ["costs.json"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600


MS = st.floats(1e-3, 1e4)


@given(
    st.dictionaries(st.integers(1, 16384), MS, min_size=1, max_size=8),
    st.dictionaries(st.integers(1, 16384), MS, min_size=1, max_size=8),
    st.integers(1, 20000),
)
def test_costs_are_the_same_after_reading(
    replay_ms: dict[int, float], eager_ms: dict[int, float], tokens: int
) -> None:
    measured = MeasuredCosts(
        {GraphKey("default", budget): ms for budget, ms in replay_ms.items()},
        {"default": eager_ms},
    )
    read = CostFile.model_validate_json(make_file(measured).model_dump_json()).costs()
    key = GraphKey("default", tokens)
    assert read.replay_cost(key) == measured.replay_cost(key)
    assert read.eager_cost("default", tokens) == measured.eager_cost("default", tokens)


def damaged(**values: Any) -> str:
    return json.dumps(json.loads(make_file().model_dump_json()) | values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "damaged"),
        (make_file().model_dump_json()[:-40], "damaged"),
        ("[]", "damaged"),
        (damaged(version=2), "version"),
        (damaged(format="other"), "format"),
        (damaged(graphs="many"), "graphs"),
        (damaged(unknown=1), "unknown"),
        (damaged(replays=[{"path": "default", "token_budget": 1, "ms": -1}]), "ms"),
        (damaged(eager=[{"path": "default", "tokens": 0, "ms": 1.0}]), "tokens"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(CostFileError, match=message) as error:
        read_costs(path)
    assert str(path) in str(error.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CostFileError, match="cannot be read"):
        read_costs(tmp_path)


@pytest.mark.parametrize("name", ["costs\0.json", "x" * 5000])
def test_a_name_that_no_file_has(name: str) -> None:
    with pytest.raises(CostFileError, match="cannot be read"):
        read_costs(name)


def test_what_is_not_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_file())
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_costs(path, make_file(MeasuredCosts({GraphKey("default", 1): 1.0}, {})))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["costs.json"]


@pytest.mark.parametrize("name", list(MeasuredEncoder.model_fields))
def test_every_difference_counts(name: str) -> None:
    other = ENCODER.model_copy(update={name: 7 if name == "ranks" else "else"})
    (difference,) = make_file().differences(other)
    assert difference.startswith(name)


class TestStartUp:
    """What a manager does with the file; measuring is replaced, as it needs a GPU."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """One entry per measurement."""
        calls: list[int] = []

        def measure(*_: Any) -> tuple[MeasuredCosts, dict[str, PathRate]]:
            calls.append(1)
            return COSTS, RATES

        monkeypatch.setattr(known_costs, "measure_encoder", measure)
        return calls

    @pytest.fixture
    def start(self, encoders: Encoders) -> Callable[[Path | str], Any]:
        manager = encoders.get("Qwen3VLForConditionalGeneration").manager

        def load(path: Path | str) -> Any:
            self.known = KnownCosts(
                str(path), manager.adapter, manager.device, RANKS, "auto"
            )
            return self.known.load_or_measure(manager._graphs)

        self.identity = identify(manager.adapter, manager.device, RANKS, "auto")
        return load

    def test_the_second_start_measures_nothing(
        self, calls: list[int], start: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "costs.json"
        for _ in range(3):
            costs, rates = start(path)
            assert (costs.replay_ms, costs.eager_ms) == (
                COSTS.replay_ms,
                COSTS.eager_ms,
            )
            assert rates == RATES
        assert len(calls) == 1
        assert read_costs(path).measured == self.identity
        assert self.identity.device == "cpu"

    @pytest.mark.parametrize(("fused", "setting"), [(True, "on"), (False, "off")])
    def test_the_forward_is_not_chosen_anew(
        self, calls: list[int], start: Any, tmp_path: Path, fused: bool, setting: str
    ) -> None:
        path = tmp_path / "costs.json"
        start(path)
        assert self.known.forward_setting == "auto"
        content = read_costs(path).model_copy(update={"fused": fused})
        write_costs(path, content)
        costs, _ = start(path)
        assert self.known.forward_setting == setting
        # This manager has captured vLLM's forward, whose times a file of the other
        # one does not have.
        assert len(calls) == (2 if fused else 1)
        assert costs.replay_ms == COSTS.replay_ms
        assert read_costs(path) == content

    def test_without_a_path_nothing_is_written(
        self, calls: list[int], encoders: Encoders
    ) -> None:
        manager = encoders.get("Qwen3VLForConditionalGeneration").manager
        known = KnownCosts(None, manager.adapter, manager.device, RANKS, "auto")
        assert known.forward_setting == "auto"
        assert known.load_or_measure(manager._graphs) == (COSTS, RATES)

    def test_a_damaged_file_is_left_alone(
        self,
        calls: list[int],
        start: Any,
        tmp_path: Path,
        package_log: pytest.LogCaptureFixture,
    ) -> None:
        path = tmp_path / "costs.json"
        path.write_text("{")
        assert start(path)[0] is COSTS
        assert path.read_text() == "{" and len(calls) == 1
        assert f"measured, not read: {path}" in package_log.text

    def test_the_file_of_another_card_is_left_alone(
        self,
        calls: list[int],
        start: Any,
        tmp_path: Path,
        package_log: pytest.LogCaptureFixture,
    ) -> None:
        path = tmp_path / "costs.json"
        write_costs(path, make_file())
        assert start(path)[0] is COSTS
        assert read_costs(path) == make_file() and len(calls) == 1
        assert "name another file" in package_log.text

    def test_where_nothing_can_be_written(
        self, calls: list[int], start: Any, package_log: pytest.LogCaptureFixture
    ) -> None:
        assert start("/no/such/folder/costs.json")[0] is COSTS
        assert "cannot be written" in package_log.text


@pytest.mark.parametrize(
    ("device", "cost_model", "reason"),
    [
        ("cpu", True, "nothing is measured on a CPU"),
        ("cuda", False, "nothing is measured as cost_model is false"),
        ("cuda", True, None),
    ],
)
def test_a_file_that_is_not_used_is_said_not_to_be(
    device: str,
    cost_model: bool,
    reason: str | None,
    package_log: pytest.LogCaptureFixture,
) -> None:
    settings = EncoderCgSettings(cost_file="costs.json", cost_model=cost_model)
    used = usable_cost_file(settings, torch.device(device))
    assert used == (None if reason else "costs.json")
    assert [reason in r.getMessage() for r in package_log.records if reason] == (
        [True] if reason else []
    )
    nothing = EncoderCgSettings(cost_model=cost_model)
    assert usable_cost_file(nothing, torch.device(device)) is None
