# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with the flag answers as vLLM does without it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines import (
    ADDITIONAL_CONFIG,
    ARCHITECTURE,
    COMPILATION_CONFIG,
    TOKENS,
    make_prompts,
    server,
)
from vllm_encoder_cg import __version__
from vllm_encoder_cg.samples.chat_media import ChatPrompt

pytestmark = pytest.mark.vllm_e2e

PROMPTS = {prompt.name: prompt for prompt in make_prompts()}


@dataclass
class Served:
    """What a server answered, and what it had logged when it was stopped."""

    at_once: dict[str, list[int]]
    streamed: dict[str, list[int]]
    log: str


@pytest.fixture(scope="module")
def served(sample_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with server(
        sample_checkpoint,
        log,
        compilation_config=COMPILATION_CONFIG,
        additional_config=ADDITIONAL_CONFIG,
    ) as url:
        at_once = {name: ask(url, prompt) for name, prompt in PROMPTS.items()}
        streamed = {
            name: ask_streaming(url, prompt) for name, prompt in PROMPTS.items()
        }
    return Served(at_once, streamed, log.read_text())


@pytest.mark.parametrize("name", PROMPTS)
def test_answers_equal_those_without_the_flag(
    name: str, served: Served, tokens_without_graphs: dict[str, list[int]]
) -> None:
    assert served.at_once[name] == tokens_without_graphs[name]
    assert served.streamed[name] == tokens_without_graphs[name]


def test_log_says_that_graphs_are_active(served: Served) -> None:
    active = f"vllm-encoder-cg {__version__} active for {ARCHITECTURE}: 3 graphs"
    assert served.log.count(active) == 1


def test_log_ends_with_the_statistics(served: Served) -> None:
    """The server encoded these images by graph: each image once, since vLLM
    caches what it encoded, and all but the one above every budget."""
    items = {str(media.part) for p in PROMPTS.values() for media in p.media}
    lines = re.findall(r"Encoder CUDA graphs: Items: (\d+).*Misses: (\d+)", served.log)
    assert len(lines) > 1, "at intervals, and at the end"
    assert lines[-1] == (str(len(items)), "1")


def request(prompt: ChatPrompt, **more: Any) -> dict[str, Any]:
    return {
        "messages": prompt.messages,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    } | more


def ask(url: str, prompt: ChatPrompt) -> list[int]:
    response = httpx.post(
        f"{url}/v1/chat/completions", json=request(prompt), timeout=120
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def ask_streaming(url: str, prompt: ChatPrompt) -> list[int]:
    token_ids: list[int] = []
    with httpx.stream(
        "POST",
        f"{url}/v1/chat/completions",
        json=request(prompt, stream=True),
        timeout=120,
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    token_ids += choice.get("token_ids") or []
    return token_ids
