# SPDX-License-Identifier: Apache-2.0
"""Runs a test file as a program, whose environment is chosen before Triton loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest


def run_with_triton(module: str, environ: Mapping[str, str]) -> None:
    """Runs ``python -m module`` in 300 seconds at most; fails with what it wrote last.

    Skips the test where PyTorch comes without Triton.

    Args:
        environ: the whole environment of the process.
    """
    pytest.importorskip("triton", reason="PyTorch's build for this machine has none")
    done = subprocess.run(
        [sys.executable, "-m", module],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
