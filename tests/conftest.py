# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support import vllm_metadata

if TYPE_CHECKING:
    from tests.support.encoders import Encoders
    from tests.support.small_encoders import SmallEncoders

# No test is about time, and an example may be the one that imports vLLM.
hypothesis.settings.register_profile("without_deadline", deadline=None)
hypothesis.settings.load_profile("without_deadline")

_METADATA_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()


#: Nothing is fetched, and the engines are small.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def pytest_configure(config: pytest.Config) -> None:
    """Make vLLM's CPU build usable before a test module imports it."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Layers this small gain nothing from a second thread.  And from the beginning:
    # where the number changes between two models in a process, vLLM's CPU build
    # computes eager embeddings wrongly on some machines (seen on an AMD EPYC).
    os.environ["OMP_NUM_THREADS"] = "1"
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


@pytest.fixture(scope="session")
def small_encoders() -> Iterator[SmallEncoders]:
    """One captured encoder per adapter, each built once."""
    from tests.support.small_encoders import SmallEncoders

    with ExitStack() as stack:
        yield SmallEncoders(stack)


@pytest.fixture(scope="session")
def sample_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-VL, without weights."""
    from tests.support.engines import ARCHITECTURE
    from vllm_encoder_cg.samples.checkpoints import write_checkpoint

    return write_checkpoint(ARCHITECTURE, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokens_without_graphs(sample_checkpoint: Path) -> Iterator[dict[str, list[int]]]:
    """What vLLM generates without encoder graphs, by the name of the prompt.

    Of session scope, as everything that holds a model: an engine that is shut
    down takes the process groups of the others in this process with it.
    """
    from tests.support.engines import generate, in_process_engine, make_prompts
    from vllm_encoder_cg.samples.engines import manager_of

    with in_process_engine(sample_checkpoint) as llm:
        assert manager_of(llm) is None
        yield {prompt.name: generate(llm, prompt) for prompt in make_prompts()}
