# SPDX-License-Identifier: Apache-2.0
"""Writes those parts of the docs that follow from the source.

    python docs/tools/generate_docs.py [--check]

A page has ``<!-- begin generated: NAME -->`` and ``<!-- end generated -->`` around
such a part.  With ``--check`` nothing is written, and the exit code is 1 if a part
is not what it should be.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Where the package is not installed, and for tools beside this one.
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import api_page  # noqa: E402
import benchmark_results  # noqa: E402
from log_lines import LogLine, advice_for, read_log_lines  # noqa: E402

from vllm_encoder_cg.models.matrix import (  # noqa: E402
    ADAPTER,
    MatrixRow,
    devices,
    matrix_rows,
    verified_on,
)
from vllm_encoder_cg.settings import EncoderCgSettings  # noqa: E402

DOCS = ROOT / "docs"

_PART = re.compile(
    r"(<!-- begin generated: (?P<name>[\w-]+) -->\n).*?(<!-- end generated -->)",
    re.DOTALL,
)


def settings() -> str:
    """The options of ``additional_config.encoder_cg``."""
    rows = []
    for name, field in EncoderCgSettings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        rows.append(
            [
                f"`{name}`",
                f"`{json.dumps(field.default)}`",
                str(extra["accepts"]),
                field.description or "",
            ]
        )
    return _table(("option", "default", "accepts", ""), rows)


def features() -> str:
    """Model x feature, of the models with an adapter."""
    rows = [
        [
            f"`{row.architecture}`",
            _yes(row.image),
            _yes(row.video),
            ", ".join(row.paths) if len(row.paths) > 1 else "",
            row.axis or "",
            ", ".join(row.backends) or "any",
            _yes(row.fused),
        ]
        for row in _adapted()
    ]
    columns = (
        "vLLM model class",
        "images",
        "videos",
        "paths",
        "graphs per budget and",
        "attention backends",
        "fused forward",
    )
    return _table(columns, rows)


def hardware() -> str:
    """Model x hardware."""
    rows = _adapted()
    known = devices(rows)
    others = ["other NVIDIA GPUs", "AMD GPUs"]
    columns = ["vLLM model class", *known[:-1], *others, *known[-1:]]
    cells = [
        [
            f"`{row.architecture}`",
            *(verified_on(row, device) for device in known[:-1]),
            *("unknown" for _ in others),
            *(verified_on(row, device) for device in known[-1:]),
        ]
        for row in rows
    ]
    return _table(columns, cells)


def log_lines() -> str:
    """Every line that serving may log, with what to do about it."""
    parts = []
    for levels, head in (
        (("error", "exception", "warning"), "Errors and warnings"),
        (("info",), "Information"),
    ):
        lines = [line for line in read_log_lines() if line.level in levels]
        parts.append(f"### {head}\n\n" + "\n\n".join(map(_log_line, lines)))
    return "\n\n".join(parts)


def _log_line(line: LogLine) -> str:
    text = re.sub(r"%(\.\d)?[sdfer]", "…", line.message.partition("\n")[0])
    return (
        f"**`{text}`**\n\n"
        f"{line.level.replace('exception', 'error')}, `{line.module}`. "
        f"{advice_for(line)}"
    )


GENERATORS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "features": features,
    "hardware": hardware,
    "log-lines": log_lines,
    "api": api_page.render,
    "results-overview": lambda: benchmark_results.overview(benchmark_results.runs()),
    "results-list": benchmark_results.listing,
}


def fill(text: str) -> str:
    """A page with all its parts as they should be.

    Raises:
        KeyError: a part has a name that is not known.
    """

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{GENERATORS[match['name']]()}\n\n{match[3]}"

    return _PART.sub(part, text)


def outdated(write: bool = False) -> list[str]:
    """Pages that are not what they should be; they are written if asked."""
    names = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        filled = fill(text)
        if filled != text:
            names.append(page.name)
            if write:
                page.write_text(filled)
    return names


def _adapted() -> list[MatrixRow]:
    """Without the protocol's, which differ with the installed vLLM."""
    return [row for row in matrix_rows() if row.driven_by == ADAPTER]


def _yes(value: Any) -> str:
    return "yes" if value else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |"
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    names = outdated(write=not args.check)
    for name in names:
        print(f"docs/{name}: {'outdated' if args.check else 'written'}")
    if args.check and names:
        print("run: python docs/tools/generate_docs.py")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
