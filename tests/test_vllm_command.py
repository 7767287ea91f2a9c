# SPDX-License-Identifier: Apache-2.0
"""The ``vllm`` command starts with this package installed, on the CPU build too."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
