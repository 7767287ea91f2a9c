# SPDX-License-Identifier: Apache-2.0
"""What a sample checkpoint of one architecture consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Vision = Literal["small", "released"]
"""``"small"``: a tower that a CPU runs in milliseconds.  ``"released"``: the vision
configuration of the released checkpoint (the text model stays tiny)."""

Json = dict[str, Any]
TokenIds = Mapping[str, int]

VOCAB_SIZE = 512

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BASE_TOKENS = (PAD, TURN_START, TURN_END)
"""Tokens that every sample tokenizer has, beside the architecture's own."""

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
"""Heads of 64, which vLLM's CPU attention takes (it takes no 16)."""
HIDDEN = HEADS * HEAD_SIZE


@dataclass(frozen=True)
class SampleArchitecture:
    """The recipe of a sample checkpoint.

    All of them generate in vLLM's CPU engine, images and videos alike.
    """

    name: str
    """The model class in vLLM."""
    modalities: tuple[str, ...]
    """``"image"`` and, where the model takes it, ``"video"``."""
    special_tokens: tuple[str, ...]
    """That the processor and the prompts need."""
    make_config: Callable[[Vision, TokenIds], Json]
    """``config.json`` from the vision size and the token ids."""
    make_files: Callable[[Vision], dict[str, Json]]
    """Further JSON files by name, from the vision size."""
    image_placeholder: str
    """The text that stands for one image in a prompt."""
    video_placeholder: str | None = None
    """The same for one video; None without videos."""
    vllm_architecture: str | None = None
    """What ``config.json`` names, where several classes share it (MiniCPM-V's); None:
    `name`."""
    tokenizer_options: Json = field(default_factory=dict)
    """Entries for ``tokenizer_config.json``."""
    engine: Json = field(default_factory=dict)
    """Further arguments that ``vllm.LLM`` needs."""
    cpu_engine: Json = field(default_factory=dict)
    """The same, only on vLLM's CPU build."""
    remote_code: tuple[str, ...] = ()
    """Files of ``samples/remote_code`` that the folder needs; they make
    ``trust_remote_code=True`` necessary."""


def pixel_limits(vision: Vision, minimum: int, maximum: int) -> Json:
    """The ``size`` entry of a Qwen-like image or video processor, in pixels.

    A small checkpoint caps it at 1024 x 1024, so that vLLM's profiling run with
    the largest image stays quick on a CPU.
    """
    if vision == "small":
        maximum = min(maximum, 1024 * 1024)
    return {"shortest_edge": minimum, "longest_edge": maximum}
