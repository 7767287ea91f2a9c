# SPDX-License-Identifier: Apache-2.0
"""Every line that the package may log, read from its source."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_encoder_cg"
ADVICE_FILE = Path(__file__).parent / "log_advice.json"
"""Begin of a message -> what to do about it."""

LEVELS = ("error", "exception", "warning", "info")
# Of commands, not of a server.
_LEFT_OUT = ("benchmarking", "cli", "samples")


@dataclass(frozen=True)
class LogLine:
    """One call of a logger."""

    module: str
    level: str
    message: str
    """The format string."""


def read_log_lines(package: Path = PACKAGE) -> list[LogLine]:
    """All of them, without those whose whole text comes from elsewhere: the most
    severe level first, then by message."""
    found = set()
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).with_suffix("").parts
        if parts[0] not in _LEFT_OUT:
            module = ".".join(parts)
            found.update(_lines_of(ast.parse(file.read_text()), module))
    return sorted(found, key=lambda line: (LEVELS.index(line.level), line.message))


def _lines_of(tree: ast.Module, module: str) -> Iterator[LogLine]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        level = _level(node.func)
        message = node.args[0]
        if (
            level is not None
            and isinstance(message, ast.Constant)
            and isinstance(message.value, str)
            and message.value.strip("%s")
        ):
            yield LogLine(module, level, message.value)


def _level(function: ast.expr) -> str | None:
    """Of ``logger.warning`` and of names that stand for one."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        if function.value.id == "logger" and function.attr in LEVELS:
            return function.attr
        return None
    if isinstance(function, ast.Name) and function.id in ("log", "level"):
        return "warning"
    return None


@cache
def read_advice() -> dict[str, str]:
    """What to do, by the begin of the message."""
    return json.loads(ADVICE_FILE.read_text())


def advice_for(line: LogLine) -> str:
    """What to do about a line; empty where nothing is said."""
    matches = [begin for begin in read_advice() if line.message.startswith(begin)]
    return read_advice()[max(matches, key=len)] if matches else ""
