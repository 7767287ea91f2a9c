# SPDX-License-Identifier: Apache-2.0
"""What may be imported where, seen from a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_encoder_cg

PACKAGE = Path(vllm_encoder_cg.__file__).parent

#: Modules that plan, describe or configure, and so load neither torch nor vLLM.
LIGHT_MODULES = [
    "",
    ".adapter",
    ".definitions",
    ".integration.entry_point",
    ".integration.environment",
    ".integration.patches",
    ".integration.versions",
    ".integration.vllm_symbols",
    ".logger",
    ".observability.metrics",
    ".observability.metrics_folder",
    ".observability.exposed_metrics",
    ".observability.metrics_files",
    ".observability.metrics_table",
    ".observability.prometheus",
    ".observability.reporter",
    ".observability.trace",
    ".observability.trace_writer",
    *(f".planning.{file.stem}" for file in sorted((PACKAGE / "planning").glob("*.py"))),
    ".protocol",
    ".settings",
]


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_loads_neither_torch_nor_vllm(module: str) -> None:
    name = f"vllm_encoder_cg{module}"
    code = (
        f"import sys, {name}\n"
        "print(*sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == []


def test_public_names() -> None:
    assert sorted(vllm_encoder_cg.__all__) == [
        "BudgetGraphMetadata",
        "EncoderCudaGraphCaptureInputs",
        "EncoderCudaGraphConfig",
        "EncoderCudaGraphManager",
        "EncoderCudaGraphPathConfig",
        "EncoderCudaGraphReplayBuffers",
        "EncoderItemSpec",
        "SupportsEncoderCudaGraph",
        "__version__",
        "register",
    ]


@pytest.mark.parametrize("name", vllm_encoder_cg.__all__)
def test_public_names_resolve_and_are_listed(name: str) -> None:
    assert getattr(vllm_encoder_cg, name) is not None
    assert name in dir(vllm_encoder_cg)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EncoderGraph'"):
        vllm_encoder_cg.EncoderGraph  # noqa: B018


def _imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _imported_of(file: Path, modules: tuple[str, ...]) -> list[str]:
    """What a file imports of these modules of the package, and of what is in them."""
    names = [f"vllm_encoder_cg.{module}" for module in modules]
    return sorted(
        imported
        for imported in _imports_of(file)
        if any(f"{imported}.".startswith(f"{name}.") for name in names)
    )


@pytest.mark.parametrize(
    "file", sorted((PACKAGE / "models").rglob("*.py")), ids=lambda file: file.stem
)
def test_models_know_nothing_of_the_manager(file: Path) -> None:
    not_theirs = (
        *("manager", "planning.planner", "graph_set", "graphs", "buffers"),
        *("startup", "observability", "integration"),
    )
    assert _imported_of(file, not_theirs) == []


@pytest.mark.parametrize("name", ["buffers", "streams", "graphs", "graph_set"])
def test_what_lives_on_knows_nothing_of_start_up(name: str) -> None:
    not_theirs = ("startup", "planning", "manager")
    assert _imported_of(PACKAGE / f"{name}.py", not_theirs) == []


@pytest.mark.parametrize(
    "file", sorted((PACKAGE / "startup").glob("*.py")), ids=lambda file: file.stem
)
def test_start_up_knows_nothing_of_those_who_start(file: Path) -> None:
    not_theirs = ("manager", "batch_executor", "plan_runner", "integration", "models")
    assert _imported_of(file, not_theirs) == []
