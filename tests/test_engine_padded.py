# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 and MiniCPM-V through an engine: the same tokens with and without graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.engines import ADDITIONAL_CONFIG, generate, in_process_engine
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.chat_media import ChatPrompt, chat_image, chat_video
from vllm_encoder_cg.samples.checkpoints import engine_kwargs, write_checkpoint
from vllm_encoder_cg.samples.cpu_gaps import without_driver
from vllm_encoder_cg.samples.engines import manager_of
from vllm_encoder_cg.samples.media import make_video, random_image

pytestmark = pytest.mark.vllm_e2e

#: Few graphs, for a quick start: budgets, and further engine arguments.
ENGINES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "Gemma4ForConditionalGeneration": (
        [140, 420],
        {"mm_processor_kwargs": {"max_soft_tokens": 140}},
    ),
    "MiniCPMV2_6": ([16, 80], {}),
}


@dataclass
class Engine:
    """An engine with graphs, and whose it is."""

    architecture: str
    llm: Any
    manager: EncoderCudaGraphManager


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    architecture = request.param
    budgets, more = ENGINES[architecture]
    folder = tmp_path_factory.mktemp(architecture)
    checkpoint = write_checkpoint(architecture, folder)
    with ExitStack() as stack:
        stack.enter_context(without_driver())
        llm = stack.enter_context(
            in_process_engine(
                checkpoint,
                compilation_config={
                    "cudagraph_mm_encoder": True,
                    "encoder_cudagraph_token_budgets": budgets,
                },
                additional_config=ADDITIONAL_CONFIG,
                **engine_kwargs(architecture, **more),
            )
        )
        manager = manager_of(llm)
        assert isinstance(manager, EncoderCudaGraphManager)
        yield Engine(architecture, llm, manager)


def make_prompts() -> list[ChatPrompt]:
    """Images of unlike shapes alone and together, and beside a video."""
    tall, wide, small = (
        chat_image(f"{width}x{height}", random_image(width, height, seed=width))
        for width, height in ((96, 200), (240, 110), (64, 64))
    )
    frames, _ = make_video(4, 96, 128, image=random_image(300, 300, seed=1))
    return [
        ChatPrompt("one", (tall,)),
        ChatPrompt("unlike", (wide, small, tall)),
        ChatPrompt("with a video", (small, chat_video("video", frames))),
    ]


def test_tokens_equal_those_of_the_models_own_encoder(engine: Engine) -> None:
    prompts = make_prompts()
    by_graph = [generate(engine.llm, prompt) for prompt in prompts]
    stats = engine.manager.get_cumulative_stats()
    media = sum(len(prompt.media) for prompt in prompts)
    assert (stats["graph_hits"], stats["graph_misses"]) == (media, 0)
    assert len(set(map(tuple, by_graph))) == len(prompts)

    engine.manager.clear()
    assert [generate(engine.llm, prompt) for prompt in prompts] == by_graph
