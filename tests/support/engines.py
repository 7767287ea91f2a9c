# SPDX-License-Identifier: Apache-2.0
"""One small checkpoint and the same questions for every way to start vLLM."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.serve_check import Server
from vllm_encoder_cg.benchmarking.engine_options import as_options
from vllm_encoder_cg.benchmarking.programs import Program
from vllm_encoder_cg.samples.chat_media import ChatPrompt, chat_image, demo_prompts
from vllm_encoder_cg.samples.checkpoints import engine_kwargs
from vllm_encoder_cg.samples.media import make_video, photographs, random_image

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
BUDGETS = [64, 256, 512]
COMPILATION_CONFIG = {
    "cudagraph_mm_encoder": True,
    "encoder_cudagraph_token_budgets": BUDGETS,
}
ADDITIONAL_CONFIG = {"encoder_cg": {"log_every_items": 3}}
TOKENS = 12
VLLM = ("-m", "vllm.entrypoints.cli.main")

_START_SECONDS = 600


def make_prompts() -> list[ChatPrompt]:
    """Photographs alone, together and with a video; an image of 1024 tokens."""
    hopper, *others = photographs()
    frames, _ = make_video(6, 96, 128, image=hopper[1])
    large = chat_image("large", random_image(1024, 1024, seed=3))
    small = chat_image("small", random_image(320, 256, seed=4))
    return [
        *demo_prompts([hopper, others[0]], frames),
        ChatPrompt("above every budget", (small, large)),
    ]


def engine_args() -> dict[str, Any]:
    """For every engine of these tests, beside the model and graphs."""
    return engine_kwargs(ARCHITECTURE) | {
        "dtype": "float32",
        "seed": 0,
        "max_num_batched_tokens": 2048,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }


def command_line(**more: Any) -> list[str]:
    """The same as options of the ``vllm`` command."""
    return as_options(engine_args() | more)


def vllm_command(*arguments: str) -> list[str]:
    """The ``vllm`` command of this environment."""
    return [sys.executable, *VLLM, *arguments]


@contextmanager
def in_process_engine(checkpoint: Path, **more: Any) -> Iterator[Any]:
    """A ``vllm.LLM`` in this process."""
    from vllm import LLM

    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        llm = LLM(model=str(checkpoint), **engine_args() | more)
    finally:
        if before is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def generate(llm: Any, prompt: ChatPrompt) -> list[int]:
    """Greedy tokens of one prompt, whose media are encoded anew."""
    from vllm import SamplingParams

    from vllm_encoder_cg.samples.engines import forget_media

    forget_media(llm)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    output = llm.chat(prompt.messages, sampling, use_tqdm=False)[0]
    return list(output.outputs[0].token_ids)


@contextmanager
def server(checkpoint: Path, log: Path, **more: Any) -> Iterator[str]:
    """``vllm serve``; yields its URL, and stops it as Ctrl-C does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*VLLM, "serve", str(checkpoint), "--port", str(port)]
    program = Program([*command, "--host", "127.0.0.1", *command_line(**more)], log)
    try:
        started = Server(program, port)
        started.wait_until_ready(_START_SECONDS)
        yield started.url
    finally:
        program.stop(60)
