# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with the flag answers as vLLM does without it."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engines import (
    ADDITIONAL_CONFIG,
    ARCHITECTURE,
    BUDGETS,
    COMPILATION_CONFIG,
    TOKENS,
    make_prompts,
    server,
)
from vllm_encoder_cg import __version__
from vllm_encoder_cg.definitions import EagerReason
from vllm_encoder_cg.observability.exposed_metrics import METRICS
from vllm_encoder_cg.observability.trace import Trace, read_trace
from vllm_encoder_cg.samples.chat_media import ChatPrompt

pytestmark = pytest.mark.vllm_e2e

PROMPTS = {prompt.name: prompt for prompt in make_prompts()}
ITEMS = {str(media.part) for p in PROMPTS.values() for media in p.media}


@dataclass
class Served:
    """What a server answered, and what it had logged when it was stopped."""

    at_once: dict[str, list[int]]
    streamed: dict[str, list[int]]
    metrics: dict[str, Metric]
    trace: Trace
    log: str


@pytest.fixture(scope="module")
def served(sample_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("serve")
    log = folder / "log.txt"
    settings = ADDITIONAL_CONFIG["encoder_cg"] | {
        "trace_file": str(folder / "trace.jsonl")
    }
    with server(
        sample_checkpoint,
        log,
        compilation_config=COMPILATION_CONFIG,
        additional_config={"encoder_cg": settings},
        cudagraph_metrics=True,
        served_model_name="sample",
        # vLLM's default of 0 kills a worker before it can log its last line.
        shutdown_timeout=30,
    ) as url:
        at_once = {name: ask(url, prompt) for name, prompt in PROMPTS.items()}
        streamed = {
            name: ask_streaming(url, prompt) for name, prompt in PROMPTS.items()
        }
        metrics = scrape(url)
    trace = read_trace(folder / "trace.*.jsonl")
    return Served(at_once, streamed, metrics, trace, log.read_text())


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
    lines = re.findall(r"Encoder CUDA graphs: Items: (\d+).*Misses: (\d+)", served.log)
    assert len(lines) > 1, "at intervals, and at the end"
    assert lines[-1] == (str(len(ITEMS)), "1")
    assert served.log.count("**Encoder CUDAGraph Stats:**") == len(lines)


def test_metrics_has_what_the_worker_counted(served: Served) -> None:
    """As vLLM's own: names that begin alike, labelled by model and engine."""

    def value(name: str, **labels: str) -> float:
        family = served.metrics[f"vllm:encoder_cudagraph_{name}"]
        (found,) = [s for s in family.samples if s.labels.items() >= labels.items()]
        assert found.labels.items() >= {"model_name": "sample", "engine": "0"}.items()
        return found.value

    assert value("queries") == len(ITEMS)
    assert value("hits") == len(ITEMS) - 1
    above = EagerReason.ABOVE_EVERY_BUDGET
    for reason in EagerReason:
        assert value("misses", reason=reason.value) == (reason is above)
    replays = served.metrics["vllm:encoder_cudagraph_replays"].samples
    assert {s.labels["token_budget"] for s in replays} <= set(map(str, BUDGETS))
    assert sum(s.value for s in replays) > 0
    assert value("graphs") == len(BUDGETS)
    assert value("replay_seconds") > 0
    assert {metric.name for metric in METRICS} <= set(served.metrics)
    # vLLM's own are untouched.
    assert served.metrics["vllm:prompt_tokens"].samples[0].value > 0


def test_the_trace_has_each_item_that_was_encoded(served: Served) -> None:
    assert served.trace.items == len(ITEMS)
    assert {batch.modality for batch in served.trace.batches} == {"image", "video"}
    assert max(max(batch.tokens) for batch in served.trace.batches) == 1024
    assert served.trace.headers[0].architecture == ARCHITECTURE
    assert served.trace.headers[0].paths["default"].budgets == tuple(BUDGETS)


def scrape(url: str) -> dict[str, Metric]:
    """``/metrics`` by name, once it shows all items; it is a second behind."""
    deadline = time.monotonic() + 30
    while True:
        response = httpx.get(f"{url}/metrics", timeout=30)
        assert response.status_code == 200
        families = text_string_to_metric_families(response.text)
        metrics = {family.name: family for family in families}
        queries = metrics.get("vllm:encoder_cudagraph_queries")
        if queries and queries.samples[0].value == len(ITEMS):
            return metrics
        assert time.monotonic() < deadline, response.text
        time.sleep(0.2)


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
