# SPDX-License-Identifier: Apache-2.0
"""The docs say what the source says, and build without a network."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import vllm_encoder_cg
from docs.tools import benchmark_results
from docs.tools.api_page import public_names
from docs.tools.generate_docs import DOCS, GENERATORS, ROOT, fill, outdated
from docs.tools.log_lines import LogLine, advice_for, read_advice, read_log_lines
from vllm_encoder_cg.models.catalog import ADAPTED
from vllm_encoder_cg.settings import EncoderCgSettings

PAGES = sorted(DOCS.glob("*.md"))


def test_generated_parts_are_current() -> None:
    assert outdated() == [], "run: python docs/tools/generate_docs.py"


def test_every_generated_part_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for name in GENERATORS:
        assert text.count(f"<!-- begin generated: {name} -->") == 1


def test_the_reference_has_every_option() -> None:
    text = (DOCS / "configuration.md").read_text()
    for name, field in EncoderCgSettings.model_fields.items():
        (line,) = [x for x in text.splitlines() if x.startswith(f"| `{name}` ")]
        assert field.description
        assert field.description.replace("|", "&#124;") in line


def test_the_matrix_has_every_model() -> None:
    text = (DOCS / "models.md").read_text()
    for model in ADAPTED:
        # Once per feature, once per hardware.
        assert text.count(f"| `{model.architecture}` |") == 2


def test_every_public_name_is_described() -> None:
    text = (DOCS / "api.md").read_text()
    for name in public_names():
        described = text.split(f"### `{name}`\n\n")[1]
        assert re.match(r"[A-Z`]", described)
    assert len(public_names()) == len(vllm_encoder_cg.__all__) - 1  # __version__


def test_a_changed_part_is_replaced() -> None:
    page = DOCS / "configuration.md"
    damaged = page.read_text().replace("| `ladder` |", "| `other` |")
    assert damaged != page.read_text()
    assert fill(damaged) == page.read_text()
    with pytest.raises(KeyError):
        fill("<!-- begin generated: no-such-part -->\n<!-- end generated -->")


def test_log_lines_are_found(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(
        "logger.warning('A %s', 1)\nlogger.info(\n    'B'\n    'C'\n)\n"
        "logger.debug('D')\nlogger.error('%s', x)\nother.warning('E')\n"
    )
    assert read_log_lines(tmp_path) == [
        LogLine("part", "warning", "A %s"),
        LogLine("part", "info", "BC"),
    ]


def test_every_line_has_advice_and_no_advice_is_stale() -> None:
    lines = read_log_lines()
    assert [line.message for line in lines if not advice_for(line)] == []
    messages = [line.message for line in lines]
    assert [
        begin
        for begin in read_advice()
        if not any(message.startswith(begin) for message in messages)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_on_a_page_is_python(page: Path) -> None:
    for block in re.findall(
        r"^ *```python\n(.*?)^ *```", page.read_text(), re.S | re.M
    ):
        ast.parse(textwrap.dedent(block))


def test_options_of_plan_in_the_guide_exist() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "vllm_encoder_cg", "plan", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    guide = (DOCS / "tuning.md").read_text().split("## 3.")[1].split("## 4.")[0]
    options = set(re.findall(r"(--[a-z][a-z-]*)", guide)) - {"--compilation-config"}
    assert options
    for option in options:
        assert option in help_text


def test_the_site_builds_with_results_and_asks_no_network(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    site = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True))
    page_text = (site / "benchmarks.html").read_text()
    for run in benchmark_results.runs():
        assert f'href="results/{run.name}/' in page_text
        for file in run.glob("*.png"):
            assert (site / "results" / run.name / file.name).is_file()
    assert not list(site.rglob("summary.json"))
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]+src=\"(https?:[^\"]+)|"
            r"<link[^>]+rel=\"stylesheet\"[^>]+href=\"(https?:[^\"]+)",
            page.read_text(),
        )
        assert not loaded, page


def test_ratios_of_a_run_are_of_the_same_batches(tmp_path: Path) -> None:
    records = [
        {
            "kind": "cases",
            "architecture": "SomeModel",
            "backend": "FLASH_ATTN",
            "device": "Some card",
            "case": case,
            "way": way,
            "median_encoder_forward_ms": ms,
        }
        for case, ours, eager in (("a", 2.0, 8.0), ("b", 4.0, 4.0))
        for way, ms in (("ours", ours), ("eager", eager))
    ]
    (tmp_path / "summary.json").write_text(json.dumps(records))
    table = benchmark_results.overview([tmp_path])
    assert "SomeModel" in table and "0.500 (1.000)" in table


def test_every_room_of_the_package_is_in_the_table() -> None:
    """A reader of the design finds where everything lives."""
    design = (DOCS / "design.md").read_text()
    table = design.partition("## Who knows what")[2].partition("\nBeside")[0]
    package = ROOT / "vllm_encoder_cg"
    rooms = [
        f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()
    ]
    rooms += [path.name for path in package.glob("[a-z]*.py")]
    assert [room for room in rooms if f"`{room}`" not in table] == []
