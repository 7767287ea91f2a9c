# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import vllm_metadata

if TYPE_CHECKING:
    from tests.support.encoders import Encoders

_METADATA_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """Make vLLM's CPU build usable before a test module imports it."""
    if vllm_metadata.is_needed():
        folder = tempfile.TemporaryDirectory(prefix="vllm-metadata-")
        config.stash[_METADATA_FOLDER] = folder
        vllm_metadata.make_known(Path(folder.name))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _METADATA_FOLDER in config.stash:
        config.stash[_METADATA_FOLDER].cleanup()


@pytest.fixture
def package_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What this package logs, registered with vLLM or not, as ``caplog``."""
    logger = logging.getLogger("vllm_encoder_cg")
    parent = logger.parent
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.DEBUG, logger=logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.parent = parent


@pytest.fixture
def unregistered() -> Iterator[None]:
    """vLLM without this package, before the test and after it."""
    from vllm_encoder_cg.integration import entry_point

    entry_point.reset()
    yield
    entry_point.reset()


@pytest.fixture(scope="session")
def encoders() -> Iterator[Encoders]:
    """Captured small encoders by architecture, each built once."""
    from tests.support.encoders import Encoders

    with ExitStack() as stack:
        yield Encoders(stack)
