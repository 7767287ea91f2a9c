# SPDX-License-Identifier: Apache-2.0
"""Adds the benchmark results, which lie outside the docs, to the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

_LIST = "<!-- benchmark results -->"
_SHOWN = (".md", ".png", ".svg")


def runs() -> list[Path]:
    """Folders with results, the latest name first."""
    return sorted((path.parent for path in RESULTS.glob("*/README.md")), reverse=True)


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs with the files of the docs."""
    for run in runs():
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
    if _LIST not in markdown:
        return markdown
    links = [f"- [{run.name}](results/{run.name}/README.md)" for run in runs()]
    return markdown.replace(
        _LIST, "\n".join(links) or "No results are kept with this version."
    )
