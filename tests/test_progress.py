# SPDX-License-Identifier: Apache-2.0
"""Progress shows on a terminal, to whom it is meant for, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from vllm_encoder_cg.progress import track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_encoder_cg.progress._DELAY_S", 0.0)


@pytest.mark.parametrize(
    ("stream", "shown", "expected"),
    [
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ],
    ids=["terminal", "another rank", "file"],
)
def test_where_it_shows(
    stream: io.StringIO,
    shown: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(track([1, 2, 3], "Working", shown)) == [1, 2, 3]
    assert ("Working" in stream.getvalue()) == expected


def test_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track([], "Working")) == []
    assert terminal.getvalue() == ""
