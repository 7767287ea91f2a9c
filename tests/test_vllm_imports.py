# SPDX-License-Identifier: Apache-2.0
"""Everything of vLLM that any module imports is on one list, and still there.

What the integration replaces or wraps is in ``vllm_symbols`` and compared when a
server starts (``test_vllm_symbols.py``).  The rest is here, with the arguments that
are passed to it: a new vLLM that changes one fails here first, by its name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import vllm_encoder_cg
from vllm_encoder_cg.integration.vllm_symbols import PROCESS_SYMBOLS, WORKER_SYMBOLS

PACKAGE = Path(vllm_encoder_cg.__file__).parent

#: Name -> (positional arguments, names of keyword arguments) that it is called
#: with; None: not called.
IMPORTED: dict[str, tuple[int, tuple[str, ...]] | None] = {
    "vllm": None,
    "vllm.envs": None,
    "vllm:LLM": (0, ("model",)),
    "vllm:SamplingParams": (0, ("temperature", "max_tokens")),
    "vllm.config:VllmConfig": (0, ()),
    "vllm.config:set_current_vllm_config": (1, ()),
    "vllm.distributed:destroy_distributed_environment": (0, ()),
    "vllm.distributed:destroy_model_parallel": (0, ()),
    "vllm.distributed:ensure_model_parallel_initialized": (2, ()),
    "vllm.distributed:get_pp_group": (0, ()),
    "vllm.distributed:get_tp_group": (0, ()),
    "vllm.distributed:init_distributed_environment": (
        0,
        ("world_size", "rank", "local_rank", "distributed_init_method", "backend"),
    ),
    "vllm.distributed:model_parallel_is_initialized": (0, ()),
    "vllm.distributed:parallel_state": None,
    "vllm.distributed.parallel_state:GraphCaptureContext": (1, ()),
    "vllm.distributed.parallel_state:set_custom_all_reduce": (1, ()),
    "vllm.engine.arg_utils:EngineArgs": (0, ("model", "compilation_config")),
    "vllm.model_executor:model_loader": None,
    "vllm.model_executor.layers.linear:ColumnParallelLinear": None,
    "vllm.model_executor.layers.linear:MergedColumnParallelLinear": None,
    "vllm.model_executor.layers.linear:QKVParallelLinear": None,
    "vllm.model_executor.layers.linear:RowParallelLinear": None,
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": None,
    "vllm.model_executor.model_loader:get_model": (0, ("vllm_config",)),
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader": (1, ()),
    "vllm.model_executor.models:registry": None,
    "vllm.platforms:current_platform": None,
    "vllm.transformers_utils.processors.deepseek_ocr:BASE_SIZE": None,
    "vllm.transformers_utils.processors.deepseek_ocr:IMAGE_SIZE": None,
    "vllm.utils.gpu_sync_debug:gpu_sync_allowed": (0, ()),
    "vllm.utils.network_utils:get_open_port": (0, ()),
    "vllm.v1.worker.encoder_cudagraph:EncoderCudaGraphManager": (4, ()),
    "vllm.v1.worker.encoder_cudagraph_defs:ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG": None,
}

#: Importable on a GPU only; elsewhere the module must speak of them.
ON_GPU = {
    "vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func",
}


def imports_of(path: Path) -> set[str]:
    """``module:name`` of everything of vLLM that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.split(".")[0] == "vllm":
                found |= {f"{module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {name for name in names if name.split(".")[0] == "vllm"}
    return found


def test_the_list_is_complete() -> None:
    found = set().union(*map(imports_of, PACKAGE.rglob("*.py")))
    assert found == {*IMPORTED, *ON_GPU}


@pytest.mark.parametrize("name", IMPORTED)
def test_vllm_has(name: str) -> None:
    module, _, attribute = name.partition(":")
    value: Any = importlib.import_module(module)
    if attribute and not hasattr(value, attribute):  # a submodule
        importlib.import_module(f"{module}.{attribute}")
    if attribute:
        value = getattr(value, attribute)
    passed = IMPORTED[name]
    if passed is not None:
        count, keywords = passed
        arguments = inspect.signature(value)
        arguments.bind(*range(count), **dict.fromkeys(keywords))


@pytest.mark.parametrize("name", sorted(ON_GPU))
def test_vllm_speaks_of(name: str) -> None:
    module, _, attribute = name.partition(":")
    source = inspect.getsource(importlib.import_module(module))
    assert attribute in source


def test_the_loader_overrides_what_there_is() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    assert {"download_model", "load_weights"} <= set(vars(BaseModelLoader))


def test_what_is_replaced_is_compared_at_start_up() -> None:
    """Patched modules are named by string, so that nothing imports them early."""
    compared = {symbol.module for symbol in (*PROCESS_SYMBOLS, *WORKER_SYMBOLS)}
    named = {
        node.value
        for path in (PACKAGE / "integration").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("vllm.")
        and " " not in node.value
        and ":" not in node.value
    }
    plugins = {"vllm.general_plugins"}
    assert named - plugins <= compared
