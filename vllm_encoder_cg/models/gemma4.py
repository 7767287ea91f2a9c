# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: an image, or a frame of a video, is a row of soft-token width.

A row has room for `width` tokens of 3 x 3 patches each.  The processor scales an
image to fill most of them and marks the rest as padding, so a row gives somewhat
fewer tokens; the graph moves the real ones together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from vllm_encoder_cg.adapter import BufferSpec, EncoderBatch, GraphShape
from vllm_encoder_cg.definitions import DEFAULT_PATH, EncoderItemSpec
from vllm_encoder_cg.models.item_counts import read_counts, row_numbers, unlike_counts
from vllm_encoder_cg.models.padded_samples import (
    TokenGrid,
    random_padded_rows,
    sample_grid,
)
from vllm_encoder_cg.models.padded_tower import PaddedTowerAdapter
from vllm_encoder_cg.models.soft_token_positions import PADDING, keep_inside
from vllm_encoder_cg.models.soft_token_rows import (
    Rows,
    copy_token_rows,
    read_frame_tokens,
    row_shapes,
    select_token_rows,
    write_token_rows,
)

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
_POSITIONS = {"image": "pixel_position_ids", "video": "pixel_position_ids_videos"}


@dataclass(frozen=True)
class Gemma4Items:
    """What ``parse`` keeps of a batch."""

    pixels: Rows
    positions: Rows
    row_offsets: list[int]
    """``[items + 1]``."""
    row_tokens: list[int]
    """Real tokens per row."""


class Gemma4Adapter(PaddedTowerAdapter):
    """Graphs exist for images of the configured width and for frames; a request
    that asks for another ``max_soft_tokens`` is encoded eagerly."""

    architectures = ("Gemma4ForConditionalGeneration",)
    tower_attribute = "vision_tower"
    axis_name = "soft tokens per image or frame"
    frame_width = 70
    """Soft tokens of a frame; vLLM's processor has no setting for it."""
    buffer_keys = ("pixels", "positions", "token_rows")

    # -- PaddedTowerAdapter --------------------------------------------------

    @property
    def modalities(self) -> tuple[str, ...]:
        return ("image", "video")

    @property
    def out_hidden_size(self) -> int:
        return self.model.config.text_config.hidden_size

    def row_lengths(self) -> tuple[int, ...]:
        return tuple(sorted({self.image_width(), self.frame_width}, reverse=True))

    def row_patches(self, length: int) -> int:
        return length * self.patches_per_token

    def row_tokens(self, length: int) -> int:
        return length

    @property
    def patches_per_token(self) -> int:
        return self.tower.config.pooling_kernel_size**2

    @property
    def patch_values(self) -> int:
        """Elements of a patch."""
        return 3 * self.tower.config.patch_size**2

    def image_width(self) -> int:
        """Soft tokens per image: of ``--mm-processor-kwargs``, or the model's."""
        multimodal = self.vllm_config.model_config.multimodal_config
        given = getattr(multimodal, "mm_processor_kwargs", None) or {}
        width = given.get("max_soft_tokens")
        of_images = given.get("images_kwargs")
        if width is None and isinstance(of_images, Mapping):
            width = of_images.get("max_soft_tokens")
        if isinstance(width, int):
            return width
        return self.model.config.vision_config.default_output_length

    # -- EncoderAdapter ------------------------------------------------------

    def unsupported_reason(self) -> str | None:
        refusal = super().unsupported_reason()
        if refusal is None and self.attention != "sdpa":
            refusal = (
                f"its vision tower uses transformers' attention {self.attention!r}, "
                "whose masks are untested here; leave the tower's attn_implementation "
                "unset to use graphs"
            )
        return refusal

    @property
    def attention(self) -> str:
        """transformers' name of the tower's attention."""
        return self.tower.config._attn_implementation

    def backend_name(self) -> str:
        return f"transformers {self.attention}"

    def buffer_specs(self, shape: GraphShape) -> dict[str, BufferSpec]:
        rows = shape.capacity.extra["rows"]
        patches = self.row_patches(self.length(shape.key))
        return {
            "pixels": BufferSpec((rows, patches, self.patch_values), self.dtype),
            "positions": BufferSpec((rows, patches, 2), torch.int64),
            "token_rows": BufferSpec((shape.capacity.tokens,), torch.int32),
        }

    def parse(self, mm_kwargs: dict[str, Any]) -> EncoderBatch | None:
        present = [m for m, key in _PIXELS.items() if key in mm_kwargs]
        if len(present) != 1:
            return None
        modality = present[0]
        pixels = mm_kwargs[_PIXELS[modality]]
        positions = mm_kwargs.get(_POSITIONS[modality])
        widths = self._read_widths(pixels, positions)
        if widths is None:
            return None
        rows_per_item = [1] * len(widths)
        tokens: list[int] | None = None
        if modality == "video":
            frames = read_counts(mm_kwargs.get("video_frame_counts"))
            if not frames or sum(frames) != len(widths) or min(frames) < 1:
                return None
            rows_per_item = frames
            tokens = read_frame_tokens(mm_kwargs.get("video_num_soft_tokens"), frames)
        if tokens is None:
            tokens = self._count_tokens(positions)
        if not all(0 < n <= w for n, w in zip(tokens, widths, strict=True)):
            return None
        offsets = list(accumulate(rows_per_item, initial=0))
        items = Gemma4Items(pixels, positions, offsets, tokens)
        specs = [
            EncoderItemSpec(
                input_size=rows * self.row_patches(widths[start]),
                output_tokens=sum(tokens[start : start + rows]),
                demand={"rows": rows},
                axis_keys=(widths[start],),
            )
            for start, rows in zip(offsets, rows_per_item, strict=False)
        ]
        return EncoderBatch(modality, specs, mm_kwargs, items)

    def _read_widths(self, pixels: Any, positions: Any) -> list[int] | None:
        """Soft tokens that each row has room for; None: not such rows."""
        shapes, places = row_shapes(pixels), row_shapes(positions)
        if not shapes or len(shapes) != len(places):
            return None
        widths = []
        for (shape, dtype), place in zip(shapes, places, strict=True):
            if len(shape) != 2 or place != ((shape[0], 2), torch.int64):
                return None
            width, rest = divmod(shape[0], self.patches_per_token)
            if rest or shape[1] != self.patch_values or dtype != self.dtype:
                return None
            widths.append(width)
        return widths

    def _count_tokens(self, positions: Rows) -> list[int]:
        """Real tokens per row; 0 for one whose patches are not whole tokens.

        An image's are known to the device alone, so this waits for it, once per
        batch; vLLM's own path does so several times per image.
        """
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed

        stacks = [positions] if isinstance(positions, torch.Tensor) else positions
        real = [(rows != PADDING).any(-1).sum(-1) for rows in stacks]
        with gpu_sync_allowed():
            patches = torch.stack(real).flatten().tolist()
        per_token = self.patches_per_token
        return [0 if count % per_token else count // per_token for count in patches]

    def fill(
        self,
        batch: EncoderBatch,
        indices: Sequence[int],
        buffers: dict[str, torch.Tensor],
        shape: GraphShape,
    ) -> None:
        items: Gemma4Items = batch.payload
        offsets = items.row_offsets
        written = copy_token_rows(items.pixels, offsets, indices, buffers["pixels"])
        copy_token_rows(items.positions, offsets, indices, buffers["positions"])
        # A row that is not used may hold positions beyond this graph's width.
        buffers["positions"][written:].fill_(PADDING)
        table = self.host_tables.take(shape.capacity.tokens)
        counts = [items.row_tokens[row] for row in row_numbers(offsets, indices)]
        write_token_rows(counts, self.length(shape.key), table.array)
        table.copy_to(buffers["token_rows"])

    def forward(
        self, buffers: dict[str, torch.Tensor], shape: GraphShape
    ) -> torch.Tensor:
        tower, length = self.tower, self.length(shape.key)
        positions, marks = keep_inside(
            buffers["positions"],
            tower.config.pooling_kernel_size,
            length,
            tower.config.position_embedding_size,
        )
        padding = (positions == PADDING).all(dim=-1)
        hidden = tower.patch_embedder(buffers["pixels"], positions, padding)
        # A mask of four dimensions is taken as it is.  From a flat one, transformers
        # would make another kind where it sees on the host that nothing is padded.
        attend = ~padding | padding.all(dim=-1, keepdim=True)
        encoded = tower.encoder(
            inputs_embeds=hidden.to(self.dtype),
            attention_mask=attend[:, None, None, :],
            pixel_position_ids=positions,
        ).last_hidden_state
        pooled, _ = tower.pooler(
            hidden_states=encoded,
            pixel_position_ids=positions,
            padding_positions=padding,
            output_length=length,
        )
        # Pooled in float32, as is what follows until the projection.
        rows = buffers["token_rows"]
        tokens = pooled.flatten(0, 1).index_select(0, rows)
        tokens = tokens + marks.index_select(0, rows // length).unsqueeze(1)
        if tower.config.standardize:
            tokens = (tokens - tower.std_bias) * tower.std_scale
        tokens = tokens.to(self.dtype)
        return self.model.embed_vision(inputs_embeds=tokens.unsqueeze(0)).squeeze(0)

    def eager(
        self, batch: EncoderBatch, indices: Sequence[int], path: str = DEFAULT_PATH
    ) -> torch.Tensor:
        items: Gemma4Items = batch.payload
        offsets = items.row_offsets
        rows = row_numbers(offsets, indices)
        mm_kwargs: dict[str, Any] = {
            _PIXELS[batch.modality]: select_token_rows(items.pixels, rows),
            _POSITIONS[batch.modality]: select_token_rows(items.positions, rows),
        }
        if batch.modality == "video":
            counts = [offsets[i + 1] - offsets[i] for i in indices]
            mm_kwargs["video_frame_counts"] = torch.tensor(counts)
        return torch.cat(list(self.model.embed_multimodal(**mm_kwargs)))

    def sample(self, shape: GraphShape, seed: int) -> dict[str, Any]:
        width = self.length(shape.key)
        rows = shape.capacity.extra["rows"]
        generator = torch.Generator(device=self.device).manual_seed(seed)
        grids = [sample_grid(width, seed + row) for row in range(rows)]
        if width == self.image_width() and (width != self.frame_width or seed % 2):
            images = grids[: shape.capacity.items]
            return self.random_images(images, generator, width)
        frames = iter(grids)
        counts = unlike_counts(rows, shape.capacity.items)
        return self.random_videos(
            [[next(frames) for _ in range(count)] for count in counts], generator
        )

    # -- Random inputs -------------------------------------------------------

    def random_images(
        self,
        grids: Sequence[TokenGrid],
        generator: torch.Generator,
        width: int | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments of ``embed_multimodal`` for images of these tokens."""
        width = width or self.image_width()
        pixels, positions = self._random_rows(grids, generator, width)
        return {_PIXELS["image"]: pixels, _POSITIONS["image"]: positions}

    def random_videos(
        self, clips: Sequence[Sequence[TokenGrid]], generator: torch.Generator
    ) -> dict[str, Any]:
        """Likewise for videos whose frames have these tokens."""
        frames = [grid for clip in clips for grid in clip]
        pixels, positions = self._random_rows(frames, generator, self.frame_width)
        return {
            _PIXELS["video"]: pixels,
            _POSITIONS["video"]: positions,
            "video_frame_counts": torch.tensor([len(clip) for clip in clips]),
            "video_num_soft_tokens": [[h * w for h, w in clip] for clip in clips],
        }

    def _random_rows(
        self, grids: Sequence[TokenGrid], generator: torch.Generator, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return random_padded_rows(
            grids,
            self.row_patches(width),
            self.tower.config.pooling_kernel_size,
            self.patch_values,
            self.dtype,
            generator,
        )
