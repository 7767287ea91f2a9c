# SPDX-License-Identifier: Apache-2.0
"""Nothing is fetched, nothing foreign is executed, and files are not trusted."""

from __future__ import annotations

import ast
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_encoder_cg
from tests.support.small_encoders import SmallEncoders, ordinary_images
from tests.support.variants import make_variant
from tests.test_cost_file import make_file
from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.observability.trace import FORMAT, VERSION, TraceError, read_trace
from vllm_encoder_cg.planning.cost_file import CostFileError, read_costs
from vllm_encoder_cg.planning.planner import Planner
from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.verification import Verifier
from vllm_encoder_cg.verification_cases import Case, images

PACKAGE = Path(vllm_encoder_cg.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

#: Modules that fetch, or that execute what they read.
MODULES = {
    "ctypes",
    "dill",
    "ftplib",
    "http",
    "httpx",
    "huggingface_hub",
    "joblib",
    "marshal",
    "modelscope",
    "pickle",
    "requests",
    "shelve",
    "socket",
    "urllib",
    "urllib3",
}
#: Calls that do.
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "torch.load"}
CALLS |= {"np.load", "numpy.load", "torch.hub.load", "os.popen"}


def foreign(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            yield f"line {node.lineno}: {ast.unparse(node.func)}"
        for name in names:
            if name.split(".")[0] in MODULES:
                yield f"line {node.lineno}: import {name}"


@pytest.mark.parametrize(
    "path", SOURCES, ids=[str(path.relative_to(PACKAGE)) for path in SOURCES]
)
def test_no_source_fetches_or_executes_what_it_reads(path: Path) -> None:
    assert list(foreign(ast.parse(path.read_text()))) == []


# -- The network ---------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this machine can be reached."""

    def is_here(address: Any) -> bool:
        return not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1")

    def guard(name: str) -> None:
        original = getattr(socket.socket, name)

        def connect(self: socket.socket, address: Any) -> Any:
            assert is_here(address), f"a connection to {address}"
            return original(self, address)

        monkeypatch.setattr(socket.socket, name, connect)

    def resolve(host: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"looks up {host}")

    guard("connect")
    guard("connect_ex")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostbyname", resolve)


@pytest.mark.usefixtures("no_network")
def test_a_model_is_built_captured_and_served_without_a_network() -> None:
    options = EncoderOptions(
        architecture="Gemma3ForConditionalGeneration",
        budgets=(64,),
        settings={"cost_model": False},
    )
    with captured_encoder(options) as manager:
        result = Verifier(manager).run(Case("batch", (images((112, 112)),)))
    assert result.problems == [] and result.hits == 1


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "architecture", ["MiniCPMV2_5", "Qwen2VLForConditionalGeneration"]
)
def test_remote_code_and_packed_models_too(
    architecture: str, small_encoders: SmallEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = small_encoders.get(architecture)
    manager = make_variant(base, monkeypatch, cost_model=False)
    manager.capture()
    assert manager.execute(ordinary_images(manager)) is not None


# -- Files -------------------------------------------------------------------------


def replace(content: Any, place: list[int], value: Any) -> Any:
    """`content` with the part at `place` replaced."""
    if not place or not isinstance(content, dict | list) or not content:
        return value
    first, *rest = place
    if isinstance(content, list):
        index = first % len(content)
        changed = replace(content[index], rest, value)
        return [*content[:index], changed, *content[index + 1 :]]
    name = list(content)[first % len(content)]
    return content | {name: replace(content[name], rest, value)}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
places = st.lists(st.integers(0, 20), min_size=1, max_size=4)

COSTS = json.loads(make_file().model_dump_json())
TRACE_LINES = [
    {
        "format": FORMAT,
        "version": VERSION,
        "architecture": "Model",
        "min_tokens": 64,
        "max_tokens": 1024,
        "paths": {"default": {"granularity": 1, "budgets": [64]}},
    },
    {"modality": "image", "tokens": [64, 70]},
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "content"


@given(places, json_values)
def test_a_cost_file_with_anything_in_it(
    file: Path, place: list[int], value: Any
) -> None:
    """Refused by its name, or it prices plans: start-up goes on."""
    file.write_text(json.dumps(replace(COSTS, place, value)))
    try:
        costs = read_costs(file).costs()
    except CostFileError as error:
        assert str(file) in str(error)
        return
    key = GraphKey(DEFAULT_PATH, 64)
    planner = Planner({key: GraphCapacity(64, 4)}, (DEFAULT_PATH,), costs=costs)
    assert planner.plan([EncoderItemSpec(4, 1), EncoderItemSpec(4, 100)]).sub_batches


@given(st.binary(max_size=64))
def test_files_of_any_bytes(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(CostFileError):
        read_costs(file)
    with pytest.raises(TraceError):
        read_trace(file)


@given(st.integers(0, 1), places, json_values)
def test_a_trace_with_anything_in_it(
    file: Path, line: int, place: list[int], value: Any
) -> None:
    lines = list(TRACE_LINES)
    lines[line] = replace(lines[line], place, value)
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    try:
        trace = read_trace(file)
    except TraceError as error:
        assert str(file) in str(error)
        return
    assert all(min(batch.tokens, default=0) >= 0 for batch in trace.batches)


def test_what_is_changed_above_is_read_as_it_is(file: Path) -> None:
    file.write_text(json.dumps(COSTS))
    assert read_costs(file).costs().replay_ms
    file.write_text("".join(json.dumps(each) + "\n" for each in TRACE_LINES))
    assert read_trace(file).items == 2


def test_an_axis_key_that_is_no_key(file: Path) -> None:
    graph = {"path": "default", "token_budget": 64, "axis_keys": [{}], "ms": 1.0}
    file.write_text(json.dumps(COSTS | {"replays": [graph]}))
    with pytest.raises(CostFileError, match="axis_keys"):
        read_costs(file)
