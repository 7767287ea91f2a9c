# SPDX-License-Identifier: Apache-2.0
"""Rows and tables arrive in captured buffers as they are asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from vllm_encoder_cg.models.host_tables import (
    DeviceTables,
    HostTable,
    copy_rows,
    select_rows,
)

OFFSETS = [0, 2, 3, 3, 6, 10]
"""Five items, one of them without rows."""


def rows_of(source: torch.Tensor, indices: list[int]) -> torch.Tensor:
    return torch.cat([source[OFFSETS[i] : OFFSETS[i + 1]] for i in indices])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_rows_lie_in_the_order_asked_for(count: int, dtype: torch.dtype) -> None:
    source = (
        torch.arange(1, 31)
        .view(10, 3)
        .to(torch.uint8 if dtype == torch.uint8 else torch.float32)
    )
    for indices in itertools.permutations(range(5), count):
        buffer = torch.full((12, 3), 77, dtype=dtype)
        expected = rows_of(source, list(indices))
        assert copy_rows(source, OFFSETS, indices, buffer, cleared=1) == len(expected)
        assert torch.equal(buffer[: len(expected)], expected.to(dtype))
        behind = buffer[len(expected) :]
        assert (behind[1:] == 77).all()
        assert (behind[:1] == (0 if dtype.is_floating_point else 77)).all()
        assert torch.equal(select_rows(source, OFFSETS, indices), expected)


def test_no_items_are_no_rows() -> None:
    source, buffer = torch.ones(10, 3), torch.ones(4, 3)
    assert copy_rows(source, OFFSETS, (), buffer) == 0
    assert not buffer.any()
    assert select_rows(source, OFFSETS, ()).shape == (0, 3)


def test_rows_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ValueError, match="10 rows do not fit a captured buffer of 9"):
        copy_rows(torch.ones(10, 3), OFFSETS, range(5), torch.ones(9, 3))


def test_all_rows_in_order_are_the_tensor_itself() -> None:
    source = torch.ones(10, 3)
    assert select_rows(source, OFFSETS, range(5)) is source


def test_known_tables_are_not_written_again() -> None:
    written = []

    def write(content: int) -> HostTable:
        written.append(content)
        table = HostTable(4)
        table.array[:] = content
        return table

    tables = DeviceTables(per_layout=2)
    buffer = torch.zeros(4, dtype=torch.int32)
    for layout, content in [
        ("a", 1),
        ("a", 2),
        ("a", 1),
        ("b", 1),
        ("a", 3),  # in the place of 2, which was not used for longest
        ("a", 1),
        ("a", 2),
    ]:
        tables.fill(buffer, layout, content, lambda c=content: write(c))  # type: ignore[misc]
        assert buffer.tolist() == [content] * 4
    assert written == [1, 2, 1, 3, 2]
