# SPDX-License-Identifier: Apache-2.0
"""The entry point: what it replaces in vLLM, and when it leaves vLLM alone."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_encoder_cg
from tests.support.fakes import FakeManager
from vllm_encoder_cg.integration import patches

pytest.importorskip("vllm")

import vllm
from vllm.platforms import current_platform

pytestmark = pytest.mark.usefixtures("unregistered")

PROCESS_NAMES = [
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "vllm.v1.worker.worker_base:WorkerBase.__init__",
]
WORKER_NAMES = [
    "vllm.v1.worker.encoder_cudagraph:EncoderCudaGraphManager",
    "vllm.v1.worker.gpu.model_states.interface:EncoderCudaGraphManager",
    "vllm.model_executor.models.interfaces:supports_encoder_cudagraph",
    "vllm.v1.worker.gpu.model_states.interface:supports_encoder_cudagraph",
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
    "vllm.v1.worker.gpu_worker:Worker.shutdown",
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    "vllm.v1.worker.gpu_worker:Worker.reload_weights",
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
    "vllm.v1.worker.gpu_worker:Worker.wake_up",
]
CPU_NAMES = [name for name in WORKER_NAMES if "cpu_worker" in name]

Log = pytest.LogCaptureFixture


def _values(names: list[str]) -> list[Any]:
    return [patches.resolve(*name.split(":"))[2] for name in names]


def _build_worker(
    additional_config: Any = None, *, enabled: bool = True, rank: int = 0
) -> None:
    """Run ``WorkerBase.__init__``, as building any worker does."""
    from vllm.v1.worker.worker_base import WorkerBase

    config = SimpleNamespace(
        kernel_config=SimpleNamespace(
            ir_op_priority=SimpleNamespace(set_default=lambda: None)
        ),
        compilation_config=SimpleNamespace(
            ir_enable_torch_wrap=True, cudagraph_mm_encoder=enabled
        ),
        parallel_config=SimpleNamespace(rank=0),
        additional_config=additional_config,
    )
    others = (
        "model_config cache_config lora_config load_config scheduler_config "
        "device_config speculative_config observability_config kv_transfer_config"
    )
    for name in others.split():
        setattr(config, name, None)
    WorkerBase(config, local_rank=rank, rank=rank, distributed_init_method="")


def _expected_in_a_worker() -> list[str]:
    return PROCESS_NAMES + [
        name
        for name in WORKER_NAMES
        if name not in CPU_NAMES or current_platform.is_cpu()
    ]


def _warnings(log: Log) -> list[str]:
    return [r.getMessage() for r in log.records if r.levelno >= logging.WARNING]


def test_vllm_finds_the_entry_point() -> None:
    (entry_point,) = importlib.metadata.entry_points(
        group="vllm.general_plugins", name="encoder_cg"
    )
    assert entry_point.load() is vllm_encoder_cg.register


def test_a_process_without_a_worker_gets_two_wrapped_functions() -> None:
    before = _values(WORKER_NAMES)
    vllm_encoder_cg.register()
    assert patches.applied_names() == PROCESS_NAMES
    assert _values(WORKER_NAMES) == before


def test_building_a_worker_replaces_exactly_these_names(package_log: Log) -> None:
    names = _expected_in_a_worker()
    before = _values(names)
    vllm_encoder_cg.register()
    _build_worker()
    assert patches.applied_names() == names
    after = _values(names)
    assert all(new is not old for old, new in zip(before, after, strict=True))
    assert _warnings(package_log) == []


WRONG_SETTINGS = [
    ({"encoder_cg": {"max_graphs": 0}}, r"encoder_cg\.max_graphs: got 0"),
    ({"encoder-cg": {}}, "did you mean 'encoder_cg'"),
    ({"encoder_cg": {"trace_file": "/no/such/folder/t.jsonl"}}, "has no folder"),
]


@pytest.mark.parametrize(("additional_config", "message"), WRONG_SETTINGS)
def test_wrong_settings_end_the_start_before_a_model_is_loaded(
    additional_config: Any, message: str
) -> None:
    vllm_encoder_cg.register()
    with pytest.raises(ValueError, match=message):
        _build_worker(additional_config)
    # Nobody asked for encoder graphs.
    _build_worker(additional_config, enabled=False)


TOO_MANY_ITEMS = {
    "encoder_cudagraph_token_budgets": [64, 128],
    "encoder_cudagraph_max_vision_items_per_batch": 65,
}


@pytest.mark.parametrize(
    ("compilation", "additional_config", "message"),
    [
        *(({}, *wrong) for wrong in WRONG_SETTINGS[:2]),
        (TOO_MANY_ITEMS, None, "per_batch: got 65, .* use at most 64"),
    ],
)
def test_wrong_settings_are_errors_of_the_arguments(
    compilation: dict[str, Any],
    additional_config: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where another plug-in has wrapped the same method."""
    from vllm.engine.arg_utils import EngineArgs

    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mm_encoder=True, **compilation),
        additional_config=additional_config,
    )

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return config

    monkeypatch.setattr(EngineArgs, "create_engine_config", create_engine_config)
    vllm_encoder_cg.register()
    engine_args: Any = object.__new__(EngineArgs)
    try:
        with pytest.raises(ValueError, match=message):
            engine_args.create_engine_config()
        config.compilation_config.cudagraph_mm_encoder = False
        assert engine_args.create_engine_config(headless=True) is config
    finally:
        # Before monkeypatch gives vLLM its own back.
        patches.undo_all()


def test_a_later_rank_needs_no_folder_for_the_trace() -> None:
    vllm_encoder_cg.register()
    _build_worker(WRONG_SETTINGS[-1][0], rank=1)


def test_twice_is_once() -> None:
    vllm_encoder_cg.register()
    _build_worker()
    names = patches.applied_names()
    after = _values(names)
    vllm_encoder_cg.register()
    _build_worker()
    assert patches.applied_names() == names
    assert _values(names) == after


def test_names_in_force_are_not_wrapped_again() -> None:
    """Even by a caller who does not know that they are."""
    vllm_encoder_cg.register()
    _build_worker()
    after = _values(patches.applied_names())
    patches.apply(patches.PROCESS_PATCHES)
    patches.apply(patches.WORKER_PATCHES, on_cpu=current_platform.is_cpu())
    assert _values(patches.applied_names()) == after


def test_vllm_gets_its_names_back() -> None:
    from vllm_encoder_cg.integration import entry_point

    names = _expected_in_a_worker()
    before = _values(names)
    vllm_encoder_cg.register()
    _build_worker()
    entry_point.reset()
    assert _values(names) == before
    assert patches.applied_names() == []


def test_the_manager_is_ours() -> None:
    from vllm.v1.worker import encoder_cudagraph

    vllm_encoder_cg.register()
    _build_worker()
    ours = vllm_encoder_cg.EncoderCudaGraphManager
    assert encoder_cudagraph.EncoderCudaGraphManager is ours


def test_cuda_is_not_initialised() -> None:
    """In a fresh process, since another test may have used the GPU."""
    code = (
        "import vllm_encoder_cg, torch; vllm_encoder_cg.register()\n"
        "from vllm_encoder_cg.integration import patches\n"
        "assert patches.applied_names(), 'not registered'\n"
        "patches.activate_in_worker()\n"
        "assert len(patches.applied_names()) > 1, 'not activated'\n"
        "assert not torch.cuda.is_initialized()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr


def test_vllm_knows_our_environment_variables() -> None:
    """So that it does not warn of them, and Ray workers get them."""
    vllm_encoder_cg.register()
    known = vllm.envs.environment_variables
    assert {"VLLM_ENCODER_CG_DISABLE", "VLLM_ENCODER_CG_ALLOW_UNTESTED"} <= set(known)


def test_switched_off(package_log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENCODER_CG_DISABLE", "1")
    vllm_encoder_cg.register()
    vllm_encoder_cg.register()
    assert patches.applied_names() == []
    (record,) = package_log.records
    assert record.levelno == logging.INFO
    assert "switched off by VLLM_ENCODER_CG_DISABLE" in record.getMessage()


def test_the_random_loader_is_there_even_when_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For comparisons with vLLM alone, with the same weights."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    monkeypatch.setenv("VLLM_ENCODER_CG_DISABLE", "1")
    vllm_encoder_cg.register()
    assert get_model_loader(LoadConfig(load_format="encoder_cg_random")) is not None


def test_switched_off_is_said_before_vllm_configures_logging() -> None:
    """As in ``LLM(...)`` within one process."""
    result = subprocess.run(
        [sys.executable, "-c", "import vllm_encoder_cg; vllm_encoder_cg.register()"],
        env={**os.environ, "VLLM_ENCODER_CG_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert result.stderr.count("switched off by VLLM_ENCODER_CG_DISABLE") == 1


def test_a_switch_with_a_strange_value_warns_and_counts_as_off(
    package_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENCODER_CG_DISABLE", "maybe")
    vllm_encoder_cg.register()
    assert patches.applied_names() == PROCESS_NAMES
    (warning,) = _warnings(package_log)
    assert warning == "VLLM_ENCODER_CG_DISABLE=maybe is neither 1 nor 0; taken as 0."


def test_an_untested_vllm_is_left_alone(
    package_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    vllm_encoder_cg.register()
    vllm_encoder_cg.register()
    assert patches.applied_names() == []
    (warning,) = _warnings(package_log)
    assert "vLLM 0.99.0" in warning
    assert vllm_encoder_cg.__version__ in warning
    assert "VLLM_ENCODER_CG_ALLOW_UNTESTED=1" in warning


def test_an_untested_vllm_may_be_allowed(
    package_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setenv("VLLM_ENCODER_CG_ALLOW_UNTESTED", "1")
    vllm_encoder_cg.register()
    assert patches.applied_names() == PROCESS_NAMES
    assert _warnings(package_log) == []


def test_a_vllm_without_the_feature_is_left_alone(
    package_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import encoder_cudagraph

    names = [name for name in _expected_in_a_worker() if name != WORKER_NAMES[0]]
    names = names[len(PROCESS_NAMES) :]
    before = _values(names)
    monkeypatch.delattr(encoder_cudagraph, "EncoderCudaGraphManager")
    vllm_encoder_cg.register()
    _build_worker()
    _build_worker()
    assert patches.applied_names() == PROCESS_NAMES
    assert _values(names) == before
    (warning,) = _warnings(package_log)
    assert "encoder_cudagraph:EncoderCudaGraphManager" in warning
    assert "vLLM is unchanged" in warning


def test_a_changed_signature_is_named_and_vllm_left_alone(
    package_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    monkeypatch.setattr(Worker, "shutdown", lambda self, timeout_s: None)
    vllm_encoder_cg.register()
    _build_worker()
    assert patches.applied_names() == PROCESS_NAMES
    (warning,) = _warnings(package_log)
    assert "Worker.shutdown has parameters (self, timeout_s)" in warning


def test_all_patches_or_none(package_log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager cannot be imported, and the patches after it do not happen."""
    before = _values(WORKER_NAMES[:5])
    monkeypatch.setitem(sys.modules, "vllm_encoder_cg.manager", None)
    vllm_encoder_cg.register()
    _build_worker()
    assert patches.applied_names() == PROCESS_NAMES
    assert _values(WORKER_NAMES[:5]) == before
    (warning,) = _warnings(package_log)
    assert "could not be put in place" in warning


def test_a_failure_while_registering_does_not_reach_vllm(
    package_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm_encoder_cg.integration.random_loader", None)
    vllm_encoder_cg.register()
    assert patches.applied_names() == []
    (warning,) = _warnings(package_log)
    assert "could not be registered" in warning


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> type[FakeManager]:
    manager = SimpleNamespace(EncoderCudaGraphManager=FakeManager)
    monkeypatch.setitem(sys.modules, "vllm_encoder_cg.manager", manager)
    vllm_encoder_cg.register()
    _build_worker()
    return FakeManager


def test_every_place_has_the_same_manager(registered: type[FakeManager]) -> None:
    assert _values(WORKER_NAMES[:2]) == [registered, registered]


def test_ledger_says_why_and_until_when() -> None:
    for patch in patches.PROCESS_PATCHES + patches.WORKER_PATCHES:
        assert patch.why
        assert patch.remove_when
