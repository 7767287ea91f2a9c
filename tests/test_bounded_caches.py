# SPDX-License-Identifier: Apache-2.0
"""What is kept between batches has a bound; what was not used for longest goes first.

A server that runs for a month meets every size of image that there is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vllm_encoder_cg
from tests.support.small_encoders import SmallEncoders
from vllm_encoder_cg.definitions import (
    DEFAULT_PATH,
    EncoderItemSpec,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.models import packed_tower, tiled_tower
from vllm_encoder_cg.models.host_tables import DeviceTables, HostTable, HostTables
from vllm_encoder_cg.planning.planner import _KNOWN_PLANS, Planner

PACKAGE = Path(vllm_encoder_cg.__file__).parent

#: Functions with few possible arguments.
FEW_ARGUMENTS = {"kernels/__init__.py", "kernels/launch.py"}


def unbounded(tree: ast.AST) -> Iterator[int]:
    """Lines on which a cache without a bound is made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "functools.cache":
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "functools":
            yield from (node.lineno for name in node.names if name.name == "cache")
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = getattr(called, "attr", getattr(called, "id", None))
        if name == "lru_cache":
            given = [*node.args, *(k.value for k in node.keywords)]
            if any(isinstance(a, ast.Constant) and a.value is None for a in given):
                yield node.lineno


def test_no_cache_without_a_bound() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "cli")
        for line in unbounded(ast.parse(path.read_text()))
    }
    assert {place for place in found if place.split(":")[0] not in FEW_ARGUMENTS} == (
        set()
    )


@pytest.fixture
def planner() -> Planner:
    key = GraphKey(DEFAULT_PATH, 8)
    return Planner({key: GraphCapacity(8, 8)}, (DEFAULT_PATH,))


def test_plans(planner: Planner) -> None:
    specs = [EncoderItemSpec(1, 1 + number % 9) for number in range(3 * _KNOWN_PLANS)]
    first = planner.plan(specs[:1])
    for number in range(1, len(specs)):
        planner.plan(specs[number : number + 1])
        assert planner.plan(specs[:1]) is first  # used all the time
    assert len(planner._known) == _KNOWN_PLANS
    kept = planner.plan(specs[-5:-4])
    planner.plan(specs[1:2])  # which was forgotten
    assert planner.plan(specs[-5:-4]) is kept
    assert len(planner._known) == _KNOWN_PLANS


def test_sizes_of_packed_images(
    small_encoders: SmallEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = small_encoders.get("Qwen2VLForConditionalGeneration")
    monkeypatch.setattr(packed_tower, "_KNOWN_GRIDS", 4)
    adapter = type(base.adapter)(base.model, base.vllm_config)
    pixels = torch.zeros(4 * 12, *adapter.row_shape, dtype=adapter.pixel_dtype)

    def parse(width: int) -> EncoderItemSpec:
        batch = adapter.parse(
            {
                "pixel_values": pixels[: 4 * width],
                "image_grid_thw": torch.tensor([[1, 2, 2 * width]]),
            }
        )
        assert batch is not None
        return batch.specs[0]

    first, second = parse(1), parse(2)
    for width in range(3, 12):
        assert parse(width).output_tokens == width
        assert parse(1) is first
    assert parse(2) is not second and parse(2) == second
    assert adapter._known_spec.cache_info().currsize == 4


def test_numbers_of_tiles(
    small_encoders: SmallEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = small_encoders.get("Gemma3ForConditionalGeneration")
    monkeypatch.setattr(tiled_tower, "_KNOWN_ITEMS", 4)
    adapter = type(base.adapter)(base.model, base.vllm_config)
    for count in range(50):
        assert adapter._item_spec((count,), None).output_tokens == 16 * count
    assert adapter._item_spec.cache_info().currsize == 4


def test_tables_on_the_host() -> None:
    tables = HostTables(per_length=3)
    taken = [tables.take(7) for _ in range(20)]
    assert len({id(table) for table in taken}) == 3
    assert taken[3] is taken[0] and taken[4] is taken[1]


def test_a_table_on_the_host_is_not_written_before_it_was_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table that is taken again waits for its last copy; a new one for nothing."""
    waited: list[HostTable] = []
    monkeypatch.setattr(HostTable, "wait", lambda table: waited.append(table))
    tables = HostTables(per_length=2)
    first, second = tables.take(7), tables.take(7)
    tables.take(5)
    assert waited == []
    assert tables.take(7) is first and waited == [first]
    assert tables.take(7) is second and waited == [first, second]


def test_tables_on_the_device() -> None:
    tables = DeviceTables(per_layout=3)
    buffer = torch.zeros(2, dtype=torch.int32)
    written: list[int] = []

    def fill(content: int) -> None:
        def write() -> HostTable:
            written.append(content)
            table = HostTable(2)
            table.array[:] = content
            return table

        tables.fill(buffer, "layout", content, write)
        assert buffer.tolist() == [content, content]

    for content in (1, 2, 3, 1, 4, 1, 5, 1, 2):
        fill(content)
    assert written == [1, 2, 3, 4, 5, 2]  # 1 was used all the time
    assert len(tables._known["layout"]) == 3
