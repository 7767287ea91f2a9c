# SPDX-License-Identifier: Apache-2.0
"""The page of promises names tests and GPU checks that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from benchmarks.gpu_faults import (  # noqa: F401 - they add their checks
    capture_checks,
    life_checks,
    replay_checks,
)
from benchmarks.gpu_faults.support import CHECKS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "promises.md").read_text()


def test_every_promise_has_a_proof() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| promise")]
    assert len(promises) > 30
    for row in promises:
        assert "`tests/" in row or "*GPU: " in row, row


def test_the_tests_exist() -> None:
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 30
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert not test or test in functions, f"{file}::{test}"


def test_the_checks_exist() -> None:
    names = [check.name for check in CHECKS]
    for named in re.findall(r"\*GPU: ([^*]+)\*", PAGE):
        assert any(name.startswith(named) for name in names), named
