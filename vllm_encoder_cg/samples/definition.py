# SPDX-License-Identifier: Apache-2.0
"""What a sample checkpoint of one architecture consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: "small": a tower that a CPU runs in milliseconds. "released": the vision
#: configuration of the released checkpoint (the text model stays tiny).
Vision = Literal["small", "released"]

Json = dict[str, Any]
TokenIds = Mapping[str, int]

VOCAB_SIZE = 512

#: Tokens that every sample tokenizer has, beside the architecture's own.
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BASE_TOKENS = (PAD, TURN_START, TURN_END)

#: Attention heads of 64, which vLLM's CPU attention takes (it takes no 16).
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
HIDDEN = HEADS * HEAD_SIZE


@dataclass(frozen=True)
class SampleArchitecture:
    """The recipe of a sample checkpoint.

    All of them generate in vLLM's CPU engine, images and videos alike.

    Attributes:
        name: the model class in vLLM; several MiniCPM-V classes share one
            ``vllm_architecture``.
        modalities: ``"image"`` and, where the model takes it, ``"video"``.
        special_tokens: the tokens that the processor and the prompts need.
        make_config: ``config.json`` from the vision size and the token ids.
        make_files: further JSON files by name, from the vision size.
        image_placeholder: the text that stands for one image in a prompt.
        video_placeholder: the same for one video; None without videos.
        tokenizer_options: entries for ``tokenizer_config.json``.
        engine: further arguments that ``vllm.LLM`` needs.
        cpu_engine: the same, only on vLLM's CPU build.
        remote_code: files of ``samples/remote_code`` that the folder needs; they
            make ``trust_remote_code=True`` necessary.
    """

    name: str
    modalities: tuple[str, ...]
    special_tokens: tuple[str, ...]
    make_config: Callable[[Vision, TokenIds], Json]
    make_files: Callable[[Vision], dict[str, Json]]
    image_placeholder: str
    video_placeholder: str | None = None
    vllm_architecture: str | None = None
    tokenizer_options: Json = field(default_factory=dict)
    engine: Json = field(default_factory=dict)
    cpu_engine: Json = field(default_factory=dict)
    remote_code: tuple[str, ...] = ()


def pixel_limits(vision: Vision, minimum: int, maximum: int) -> Json:
    """The ``size`` entry of a Qwen-like image or video processor, in pixels.

    A small checkpoint caps it at 1024 x 1024, so that vLLM's profiling run with
    the largest image stays quick on a CPU.
    """
    if vision == "small":
        maximum = min(maximum, 1024 * 1024)
    return {"shortest_edge": minimum, "longest_edge": maximum}
