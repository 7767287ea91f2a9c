# SPDX-License-Identifier: Apache-2.0
"""What the integration does with vLLM's runners, on stand-ins for them."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode

from tests.support.fakes import (
    FakeManager,
    ModelWithAdapter,
    ModelWithout,
    make_v1_runner,
    make_v2_runner,
    make_worker,
)
from vllm_encoder_cg.integration import runners, status

Log = pytest.LogCaptureFixture


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager(None, None, None, ModelWithAdapter())


@pytest.fixture(params=["cpu", "gpu"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(status, "_on_cpu", lambda: request.param == "cpu")
    return request.param


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_on_cpu", lambda: False)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_on_cpu", lambda: True)


class TestCaptureOnCpu:
    def test_v1_manager_is_created_and_captured(self, manager: FakeManager) -> None:
        runner = make_v1_runner(ModelWithAdapter(), manager)
        runners.capture_on_cpu(make_worker(runner, enforce_eager=True))
        assert runner.encoder_cudagraph_manager is manager
        assert manager.is_captured()

    def test_v2_manager_is_captured(self, manager: FakeManager) -> None:
        runners.capture_on_cpu(make_worker(make_v2_runner(ModelWithAdapter(), manager)))
        assert manager.is_captured()

    def test_nothing_without_the_flag(self, manager: FakeManager) -> None:
        runner = make_v1_runner(ModelWithAdapter(), manager)
        runners.capture_on_cpu(make_worker(runner, cudagraph_mm_encoder=False))
        assert runner.encoder_cudagraph_manager is None

    def test_a_model_without_a_manager(self) -> None:
        runner = make_v1_runner(ModelWithout())
        runners.capture_on_cpu(make_worker(runner))
        assert runner.encoder_cudagraph_manager is None

    def test_captured_once(self, manager: FakeManager) -> None:
        worker = make_worker(make_v1_runner(ModelWithAdapter(), manager))
        runners.capture_on_cpu(worker)
        runners.capture_on_cpu(worker)
        assert manager.calls == ["capture"]

    def test_bad_settings_stop_the_start(self) -> None:
        def refuse() -> None:
            raise ValueError("encoder_cudagraph_token_budgets: 7 is too small")

        runner = make_v1_runner(ModelWithAdapter())
        runner._maybe_init_encoder_cudagraph_manager = refuse
        with pytest.raises(ValueError, match="7 is too small"):
            runners.capture_on_cpu(make_worker(runner))


class TestHasAdapter:
    @pytest.fixture(autouse=True)
    def registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def find_adapter(model: Any) -> type | None:
            return object if isinstance(model, ModelWithAdapter) else None

        monkeypatch.setitem(
            sys.modules,
            "vllm_encoder_cg.models.registry",
            SimpleNamespace(find_adapter=find_adapter),
        )

    def test_by_the_loaded_model(self) -> None:
        assert runners.has_adapter(ModelWithAdapter())
        assert not runners.has_adapter(ModelWithout())

    def test_a_class_is_no_loaded_model(self) -> None:
        assert not runners.has_adapter(ModelWithAdapter)

    def test_a_failing_look_up_warns_and_means_no(
        self, monkeypatch: pytest.MonkeyPatch, package_log: Log
    ) -> None:
        monkeypatch.setitem(sys.modules, "vllm_encoder_cg.models.registry", None)
        assert not runners.has_adapter(ModelWithAdapter())
        assert "Cannot look for an encoder adapter" in package_log.text


class TestFinalStats:
    @pytest.mark.parametrize("make_runner", [make_v1_runner, make_v2_runner])
    def test_logged(self, make_runner: Any, manager: FakeManager) -> None:
        runner = make_runner(ModelWithAdapter(), manager)
        if make_runner is make_v1_runner:
            runner.encoder_cudagraph_manager = manager
        runners.log_final_stats(make_worker(runner))
        assert manager.calls == ["log_final_stats"]

    @pytest.mark.parametrize(
        "worker",
        [
            SimpleNamespace(),
            SimpleNamespace(model_runner=None),
            make_worker(make_v1_runner(ModelWithout())),
            make_worker(make_v2_runner(ModelWithout())),
        ],
        ids=["no runner yet", "runner is None", "V1", "V2"],
    )
    def test_nothing_to_log(self, worker: Any, package_log: Log) -> None:
        runners.log_final_stats(worker)
        assert package_log.records == []

    def test_never_raises(
        self, manager: FakeManager, monkeypatch: pytest.MonkeyPatch, package_log: Log
    ) -> None:
        def fail() -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(manager, "log_final_stats", fail)
        runner = make_v2_runner(ModelWithAdapter(), manager)
        runners.log_final_stats(make_worker(runner))
        assert "Cannot log the final encoder statistics" in package_log.text


class TestStatus:
    def _line(self, worker: Any, log: Log) -> str:
        status.log_status(worker)
        (record,) = log.records
        assert record.levelno == logging.INFO
        assert vllm_encoder_cg_version() in record.getMessage()
        return record.getMessage()

    @pytest.mark.parametrize("make_runner", [make_v1_runner, make_v2_runner])
    def test_active(
        self, make_runner: Any, manager: FakeManager, package_log: Log, platform: str
    ) -> None:
        runner = make_runner(ModelWithAdapter(), manager)
        if make_runner is make_v1_runner:
            runner.encoder_cudagraph_manager = manager
        manager.capture(None)
        line = self._line(make_worker(runner), package_log)
        assert "active for ModelWithAdapter: 2 graphs for 64 to 128 tokens" in line
        assert ("on the CPU" in line) == (platform == "cpu")

    @pytest.mark.usefixtures("platform")
    def test_flag_off(self, package_log: Log) -> None:
        worker = make_worker(make_v1_runner(ModelWithout()), cudagraph_mm_encoder=False)
        line = self._line(worker, package_log)
        assert "not active for ModelWithout: cudagraph_mm_encoder is off" in line
        assert "--compilation-config '{\"cudagraph_mm_encoder\": true}'" in line

    @pytest.mark.usefixtures("platform")
    @pytest.mark.parametrize("make_runner", [make_v1_runner, make_v2_runner])
    def test_model_without_support(self, make_runner: Any, package_log: Log) -> None:
        line = self._line(make_worker(make_runner(ModelWithout())), package_log)
        assert "ModelWithout has no adapter" in line

    @pytest.mark.usefixtures("platform")
    def test_text_only(self, package_log: Log) -> None:
        runner = make_v1_runner(ModelWithout())
        runner.supports_mm_inputs = False
        line = self._line(make_worker(runner), package_log)
        assert "no multimodal input is encoded here" in line

    @pytest.mark.usefixtures("platform")
    def test_later_pipeline_rank_of_v2(self, package_log: Log) -> None:
        runner = make_v2_runner(ModelWithAdapter())
        runner.model_state = SimpleNamespace(supports_mm_inputs=False)
        line = self._line(make_worker(runner), package_log)
        assert "no multimodal input is encoded here" in line

    @pytest.mark.usefixtures("platform")
    def test_manager_that_cannot_serve(
        self, manager: FakeManager, package_log: Log
    ) -> None:
        manager.active = False
        manager.inactive_reason = "the vision tower is not loaded"
        runner = make_v2_runner(ModelWithAdapter(), manager)
        line = self._line(make_worker(runner), package_log)
        assert line.endswith(
            "not active for ModelWithAdapter: the vision tower is not loaded."
        )

    @pytest.mark.usefixtures("on_gpu")
    @pytest.mark.parametrize("make_runner", [make_v1_runner, make_v2_runner])
    def test_enforce_eager_on_a_gpu(self, make_runner: Any, package_log: Log) -> None:
        worker = make_worker(
            make_runner(ModelWithAdapter()),
            enforce_eager=True,
            cudagraph_mode=CUDAGraphMode.NONE,
        )
        assert "enforce_eager is set" in self._line(worker, package_log)

    @pytest.mark.usefixtures("on_gpu")
    def test_no_decoder_graphs_with_v1(self, package_log: Log) -> None:
        worker = make_worker(
            make_v1_runner(ModelWithAdapter()), cudagraph_mode=CUDAGraphMode.NONE
        )
        assert "cudagraph_mode is NONE" in self._line(worker, package_log)

    @pytest.mark.usefixtures("on_cpu")
    def test_enforce_eager_on_the_cpu_is_no_reason(self, package_log: Log) -> None:
        worker = make_worker(
            make_v1_runner(ModelWithout()),
            enforce_eager=True,
            cudagraph_mode=CUDAGraphMode.NONE,
        )
        assert "has no adapter" in self._line(worker, package_log)

    @pytest.mark.usefixtures("platform")
    def test_nothing_captured(self, manager: FakeManager, package_log: Log) -> None:
        runner = make_v2_runner(ModelWithAdapter(), manager)
        line = self._line(make_worker(runner), package_log)
        assert "the graphs were not captured" in line

    def test_never_raises(self, package_log: Log) -> None:
        status.log_status(SimpleNamespace())
        assert "Cannot tell whether encoder CUDA graphs are active" in package_log.text


def vllm_encoder_cg_version() -> str:
    import vllm_encoder_cg

    return f"vllm-encoder-cg {vllm_encoder_cg.__version__} "
