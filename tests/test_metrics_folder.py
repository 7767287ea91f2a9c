# SPDX-License-Identifier: Apache-2.0
"""The folder between workers and ``/metrics``: whose it is, and when it goes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_encoder_cg.integration.environment import METRICS_DIR
from vllm_encoder_cg.observability import prometheus


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of another test's registration."""
    prometheus.withdraw_metrics()
    monkeypatch.delenv(METRICS_DIR, raising=False)
    yield
    prometheus.withdraw_metrics()


def folder_named() -> Path:
    return Path(os.environ[METRICS_DIR])


def test_withdrawing_leaves_nothing() -> None:
    prometheus.offer_metrics()
    folder = folder_named()
    assert folder.is_dir()
    prometheus.withdraw_metrics()
    assert METRICS_DIR not in os.environ
    assert not folder.exists()


def test_a_server_started_by_another_process_has_a_folder_of_its_own() -> None:
    prometheus.offer_metrics()
    code = (
        "import os\n"
        "from vllm_encoder_cg.observability import prometheus\n"
        "prometheus.offer_metrics()\n"
        "folder = os.environ['VLLM_ENCODER_CG_METRICS_DIR']\n"
        "print(folder, os.path.isdir(folder))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    folder, existed = result.stdout.split()
    assert existed == "True"
    assert Path(folder) != folder_named()
    assert not Path(folder).exists(), "removed as the process exits"


def test_what_a_killed_server_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that is in use, or that is not known to be abandoned."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = (
        "import os, signal\n"
        "from vllm_encoder_cg.observability import prometheus\n"
        "prometheus.offer_metrics()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", killed], env=environment, timeout=60)
    (left,) = tmp_path.iterdir()
    prometheus.offer_metrics()
    in_use = folder_named()
    assert not left.exists()
    just_made = tmp_path / "vllm-encoder-cg-metrics-1"
    just_made.mkdir()
    alive = (
        "from vllm_encoder_cg.observability import prometheus\n"
        "prometheus.offer_metrics()"
    )
    subprocess.run(
        [sys.executable, "-c", alive], env=environment, timeout=60, check=True
    )
    assert sorted(tmp_path.iterdir()) == sorted([in_use, just_made])
