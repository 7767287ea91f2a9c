# SPDX-License-Identifier: Apache-2.0
"""Images and videos as parts of a chat message, for ``LLM.chat`` and servers."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

QUESTION = "Describe this."


@dataclass(frozen=True)
class ChatMedia:
    """One image or video."""

    name: str
    modality: Literal["image", "video"]
    frames: int
    """1 for an image."""
    width: int
    height: int
    part: dict[str, Any] = field(repr=False)
    """In the form of OpenAI's chat messages, with a data URL."""

    @property
    def size(self) -> str:
        """In pixels."""
        size = f"{self.width}x{self.height}"
        return size if self.modality == "image" else f"{self.frames}x{size}"


@dataclass(frozen=True)
class ChatPrompt:
    """One user message."""

    name: str
    media: tuple[ChatMedia, ...]

    @property
    def messages(self) -> list[dict[str, Any]]:
        text = {"type": "text", "text": QUESTION}
        content = [*(media.part for media in self.media), text]
        return [{"role": "user", "content": content}]

    def of_modality(self, modality: str) -> list[ChatMedia]:
        """The media of one modality."""
        return [media for media in self.media if media.modality == modality]


def chat_image(name: str, image: Image.Image) -> ChatMedia:
    """An image, losslessly."""
    url = f"data:image/png;base64,{_encode(image, 'PNG')}"
    part = {"type": "image_url", "image_url": {"url": url}}
    return ChatMedia(name, "image", 1, image.width, image.height, part)


def chat_video(name: str, frames: np.ndarray) -> ChatMedia:
    """A video as JPEG frames, which is a form that vLLM takes.

    Args:
        frames: ``[frames, height, width, 3]`` uint8.
    """
    from PIL import Image

    count, height, width, _ = frames.shape
    encoded = ",".join(_encode(Image.fromarray(frame), "JPEG") for frame in frames)
    url = f"data:video/jpeg;base64,{encoded}"
    part = {"type": "video_url", "video_url": {"url": url}}
    return ChatMedia(name, "video", count, width, height, part)


def demo_prompts(
    images: Sequence[tuple[str, Image.Image]], frames: np.ndarray
) -> list[ChatPrompt]:
    """The images one at a time, all together, and around a video."""
    media = [chat_image(name, image) for name, image in images]
    video = chat_video("video", frames)
    prompts = [ChatPrompt(item.name, (item,)) for item in media]
    if len(media) > 1:
        prompts.append(ChatPrompt("together", tuple(media)))
    around = media[1:] and (media[-1],)
    prompts.append(ChatPrompt("with a video", (media[0], video, *around)))
    return prompts


def _encode(image: Image.Image, kind: str) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format=kind)
    return base64.b64encode(buffer.getvalue()).decode()
