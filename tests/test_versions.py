# SPDX-License-Identifier: Apache-2.0
"""Which vLLM counts as tested, and what a user is told about another."""

from __future__ import annotations

import pytest

from vllm_encoder_cg import __version__
from vllm_encoder_cg.integration.versions import parse_version, why_untested


@pytest.mark.parametrize(
    ("version", "platform"),
    [
        ("0.32.0", "cpu"),
        ("0.32.4+cpu", "cpu"),
        ("0.33.0", "cuda"),
        ("0.33.0", "cpu"),
        ("0.33.1rc1.dev3+gabcdef", "cuda"),
    ],
)
def test_tested_versions(version: str, platform: str) -> None:
    assert why_untested(version, platform) is None


@pytest.mark.parametrize(
    ("version", "platform"),
    [
        ("0.31.9", "cpu"),
        ("0.32.0", "cuda"),
        ("0.34.0", "cuda"),
        ("1.32.0", "cpu"),
        ("dev", "cuda"),
        ("0.32.0", ""),
    ],
)
def test_untested_versions_are_named_with_the_override(
    version: str, platform: str
) -> None:
    message = why_untested(version, platform)
    assert message is not None
    assert f"vLLM {version} " in message
    assert f"vllm-encoder-cg {__version__}" in message
    assert "VLLM_ENCODER_CG_ALLOW_UNTESTED=1" in message
    assert ">=0.32,<0.33 on cpu; >=0.33,<0.34" in message


def test_a_build_without_a_number_has_no_version() -> None:
    assert parse_version("dev") is None
    assert parse_version("0.33.0+cu129") == (0, 33)
