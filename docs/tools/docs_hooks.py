# SPDX-License-Identifier: Apache-2.0
"""Adds the benchmark results, which lie outside the docs, to the site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))  # for tools beside this one

import benchmark_results

_SHOWN = (".md", ".png", ".svg")


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs with the files of the docs."""
    for run in benchmark_results.runs():
        for path in sorted(run.iterdir()):
            if path.suffix in _SHOWN:
                files.append(
                    File.generated(
                        config,
                        f"results/{run.name}/{path.name}",
                        abs_src_path=str(path),
                    )
                )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page."""
    return markdown.replace(f"]({benchmark_results.LINK}", "](results/")
