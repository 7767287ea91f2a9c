# SPDX-License-Identifier: Apache-2.0
"""Compatibility with the installed vLLM, one test per name that we rely on.

A new vLLM that changes something fails here first, with the name in the test id.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from vllm_encoder_cg.integration import patches, vllm_symbols
from vllm_encoder_cg.integration.vllm_symbols import (
    PROCESS_SYMBOLS,
    WORKER_SYMBOLS,
    VllmSymbol,
    find_difference,
    find_differences,
)

pytest.importorskip("vllm")

MANAGER_PREFIX = "EncoderCudaGraphManager."
MANAGER_METHODS = [
    symbol for symbol in WORKER_SYMBOLS if symbol.name.startswith(MANAGER_PREFIX)
]


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize("symbol", PROCESS_SYMBOLS + WORKER_SYMBOLS, ids=str)
def test_vllm_has(symbol: VllmSymbol) -> None:
    from vllm.platforms import current_platform

    if symbol.cpu_only and not current_platform.is_cpu():
        pytest.skip("vLLM's build for a GPU has no CPU worker to patch")
    assert find_difference(symbol) is None


@pytest.mark.parametrize("symbol", MANAGER_METHODS, ids=str)
def test_our_manager_takes_what_vllm_passes(symbol: VllmSymbol) -> None:
    """vLLM's call, by position or by keyword, binds to our method."""
    from vllm_encoder_cg import EncoderCudaGraphManager

    method = getattr(EncoderCudaGraphManager, symbol.name.removeprefix(MANAGER_PREFIX))
    signature = inspect.signature(method)
    assert symbol.parameters is not None
    signature.bind(*symbol.parameters)
    signature.bind("self", **dict.fromkeys(symbol.parameters[1:]))


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize(
    ("path", "expressions"),
    [
        (
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
            [
                "self.encoder_cudagraph_manager.supports_modality(modality)",
                "self.encoder_cudagraph_manager.execute(",
                "encoder_cudagraph_manager.token_budgets[-1]",
                "self.encoder_cudagraph_manager.capture(graph_pool=",
            ],
        ),
        (
            "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner",
            ["cg_manager.is_captured()", "manager.capture(graph_pool="],
        ),
        (
            "vllm.v1.worker.gpu.model_states.interface:ModelState",
            ["self.encoder_runner = EncoderRunner(", "cudagraph_manager="],
        ),
    ],
)
def test_vllm_uses_a_manager_as_before(path: str, expressions: list[str]) -> None:
    """Attributes of instances have no signature; the source shows their use."""
    module, name = path.split(":")
    _, _, owner = vllm_symbols.resolve(module, name)
    source = inspect.getsource(owner)
    for expression in expressions:
        assert expression in source


def test_every_patched_name_is_checked_first() -> None:
    checked = {str(symbol) for symbol in PROCESS_SYMBOLS + WORKER_SYMBOLS}
    for patch in patches.PROCESS_PATCHES + patches.WORKER_PATCHES:
        covered = {name for name in checked if name.startswith(str(patch))}
        assert covered, f"{patch} is replaced and never compared"


@pytest.fixture
def a_module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(function=lambda first, second: None)
    monkeypatch.setattr(vllm_symbols, "import_module", lambda name: module)
    return module


@pytest.mark.usefixtures("a_module")
def test_differences_are_readable() -> None:
    wanted = (
        VllmSymbol("there", "function", ("first", "second")),
        VllmSymbol("there", "function", ("first",)),
        VllmSymbol("there", "gone"),
    )
    changed, missing = find_differences(wanted)
    assert changed == (
        "there:function has parameters (first, second), expected (first)"
    )
    assert missing.startswith("there:gone is missing (AttributeError")


def test_missing_fields_are_named() -> None:
    symbol = VllmSymbol(
        "vllm_encoder_cg.integration.vllm_symbols", "VllmSymbol", fields=("name", "age")
    )
    assert find_difference(symbol) == f"{symbol} lacks the fields age"


def test_what_only_the_cpu_needs_is_asked_there_only() -> None:
    symbol = VllmSymbol("no_such_module", "name", cpu_only=True)
    assert find_differences((symbol,)) == []
    assert len(find_differences((symbol,), on_cpu=True)) == 1
