# SPDX-License-Identifier: Apache-2.0
"""Our log lines look like vLLM's."""

from __future__ import annotations

import io
import logging
import re

import pytest

from vllm_encoder_cg.logger import init_logger, use_vllm_logging

_LINE = (
    r"pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[test_logger.py:\d+\] "
    r"three graphs\n"
)


@pytest.fixture
def vllm_output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What vLLM's own handler writes, once vLLM has configured it."""
    pytest.importorskip("vllm")
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    own = logging.getLogger("vllm_encoder_cg")
    monkeypatch.setattr(own, "parent", own.parent)
    use_vllm_logging()
    # Afterwards, as LLM(...) does.
    configure_logging(LoggingConfig())
    (handler,) = (
        handler
        for handler in logging.getLogger("vllm").handlers
        if handler.name == "vllm"
    )
    stream = io.StringIO()
    monkeypatch.setattr(handler, "stream", stream)
    return stream


def test_lines_have_vllm_s_format(vllm_output: io.StringIO) -> None:
    init_logger("vllm_encoder_cg.tests").info("%s graphs", "three")
    assert re.search(_LINE, vllm_output.getvalue())


def test_level_follows_vllm_s(
    vllm_output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.WARNING)
    logger = init_logger("vllm_encoder_cg.tests.level")
    logger.info("not wanted")
    logger.warning("wanted")
    assert "not wanted" not in vllm_output.getvalue()
    assert "wanted" in vllm_output.getvalue()


def test_works_without_vllm(caplog: pytest.LogCaptureFixture) -> None:
    logger = init_logger("vllm_encoder_cg.tests.alone")
    assert logger is logging.getLogger("vllm_encoder_cg.tests.alone")
