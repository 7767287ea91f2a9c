# SPDX-License-Identifier: Apache-2.0
"""Attention of a fused block, on a packed projection.

An ``Attend`` is made once per forward and serves all of its layers.  Where
FlashAttention runs, it calls the kernel that vLLM's ``MMEncoderAttention`` wraps, on
q, k and v as they lie in the projection, and leaves out what that wrapper does for
each layer anew: clearing the output (rows behind the last sequence are cleared in q,
k and v instead, see ``kernels.rotate_heads``), and making offsets.  A graph of few
rows, where FlashAttention's schedule takes as long as its attention, rotates and
attends in one kernel of this package.  Other backends are called through vLLM's layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from vllm_encoder_cg import kernels
from vllm_encoder_cg.kernels import reference
from vllm_encoder_cg.kernels.short_rows import AttendOnce, short_rows
from vllm_encoder_cg.models.attention_tables import AttentionArguments
from vllm_encoder_cg.models.fused.modules import HALVES, Norm, is_exactly, linear

ROW_OFFSETS = ("FLASH_ATTN", "TRITON_ATTN")
"""Backends whose ``cu_seqlens`` are rows."""
_MAX_HEAD_SIZE = 128
"""Whose blocks fit the shared memory of any GPU."""


@dataclass(frozen=True)
class Rotary:
    """Rotary tables of all rows of a forward."""

    cos: torch.Tensor
    """``[rows, head size / 2]``."""
    sin: torch.Tensor
    row_total: torch.Tensor | None
    """``[1] int32`` on the device: rows that belong to a sequence."""
    interleaved: bool = False
    """Whether pairs are neighbours, not halves of a head."""

    @classmethod
    def of(cls, encoder_metadata: dict[str, Any]) -> Rotary:
        """The tables that adapters make under vLLM's names."""
        return cls(
            encoder_metadata["rotary_pos_emb_cos"],
            encoder_metadata["rotary_pos_emb_sin"],
            encoder_metadata["row_total"],
        )


class Attend(ABC):
    """Attention of all layers of one forward.

    Args:
        layer: an ``MMEncoderAttention``; all of the tower are alike.
        starts: ``[sequences + 1] int32`` on the device: where sequences begin.
        max_seqlen: rows of the longest; a tensor is one on the host.
        keep_finite: whether rows behind the last sequence must be finite in the
            output too, because something looks at all rows together.
    """

    direct: ClassVar[bool] = True
    """Whether to call FlashAttention itself, where it is the backend."""
    splits: ClassVar[int] = 1
    """Parts in which FlashAttention 3 reads keys; more need a kernel to combine
    them.  0: as it chooses itself."""
    short_rows: int | None = None
    """Rows of a graph up to which ``kernels.short_attention`` is used instead; None:
    as measured."""

    def __init__(
        self,
        layer: Any,
        starts: torch.Tensor,
        max_seqlen: int | torch.Tensor,
        *,
        keep_finite: bool,
    ) -> None:
        self.starts = starts
        self.reads_packed = layer.attn_backend.name != "FLASHINFER"
        """Whether q and k may be read where they lie in the projection; cuDNN takes
        contiguous ones."""
        name = layer.attn_backend.name
        known = (
            self.direct
            and is_exactly(layer, "MMEncoderAttention")
            and not getattr(layer, "fp8_enabled", False)
            and kernels.is_available(starts.device)
        )
        self._flash: dict[str, Any] | None = None
        if known and name == "FLASH_ATTN":
            self._flash = self._flash_arguments(layer, int(max_seqlen))
        self._make_output = torch.zeros if keep_finite else torch.empty
        self.own_kernels = (
            known
            and name in ROW_OFFSETS
            and layer.head_size <= _MAX_HEAD_SIZE
            and layer.dtype in HALVES
            and not keep_finite
        )
        """Whether this package's attention may take the place of the backend's."""
        self._bounds: torch.Tensor | None = None

    def _flash_arguments(self, layer: Any, max_seqlen: int) -> dict[str, Any]:
        arguments = {
            "cu_seqlens_q": self.starts,
            "cu_seqlens_k": self.starts,
            "max_seqlen_q": max_seqlen,
            "max_seqlen_k": max_seqlen,
            "causal": False,
        }
        version = layer._fa_version
        if version is not None:
            arguments["fa_version"] = version
        if version == 3:
            arguments["num_splits"] = self.splits
        return arguments

    def __call__(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """``[rows, heads x size]`` from three tensors ``[rows, heads, size]``."""
        if self._flash is None:
            return self.through_layer(layer, q, k, v).reshape(len(q), -1)
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        output = self._make_output(q.shape, dtype=q.dtype, device=q.device)
        flash_attn_varlen_func(
            q, k, v, softmax_scale=layer.scale, out=output, **self._flash
        )
        return output.flatten(1)

    def on_projection(
        self, layer: Any, packed: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        """``[rows, heads x size]`` from a packed projection before rotation, which
        may be overwritten."""
        if self.is_short(layer, len(packed), rotary):
            from vllm_encoder_cg.kernels import short_attention

            if self._bounds is None:
                self._bounds = short_attention.sequence_bounds(self.starts, len(packed))
            return short_attention.short_attention(
                packed,
                rotary.cos,
                rotary.sin,
                layer.num_heads,
                self._bounds,
                layer.scale,
            )
        q, k, v = rotate(packed, layer.num_heads, rotary, in_place=self.reads_packed)
        return self(layer, q, k, v)

    def is_short(self, layer: Any, rows: int, rotary: Rotary) -> bool:
        """Whether one kernel of this package rotates and attends."""
        if not self.own_kernels or rotary.interleaved:
            return False
        limit = self.short_rows
        if limit is None:
            device = self.starts.device
            limit = short_rows(layer, device, partial(_attend_once, layer, device))
        return rows <= limit

    @abstractmethod
    def through_layer(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """The same by vLLM's layer, in any shape."""


class SequenceAttention(Attend):
    """Attention inside the sequences of one table.

    Args:
        arguments: what vLLM's layer is called with.
    """

    def __init__(
        self, layer: Any, arguments: AttentionArguments, *, keep_finite: bool
    ) -> None:
        super().__init__(
            layer,
            arguments.cu_seqlens,
            arguments.max_seqlen,
            keep_finite=keep_finite,
        )
        self._arguments = arguments

    def through_layer(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return layer(
            query=q.unsqueeze(0),
            key=k.unsqueeze(0),
            value=v.unsqueeze(0),
            cu_seqlens=self._arguments.cu_seqlens,
            max_seqlen=self._arguments.max_seqlen,
            sequence_lengths=self._arguments.sequence_lengths,
        )


def _attend_once(
    layer: Any, device: torch.device, rows: int, short: bool
) -> AttendOnce:
    """Attention of one sequence by one kernel, or not."""
    starts = torch.tensor([0, rows], dtype=torch.int32, device=device)
    arguments = AttentionArguments(starts, torch.tensor(rows))
    attend = SequenceAttention(layer, arguments, keep_finite=False)
    attend.short_rows = rows if short else 0

    def call(
        packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return attend.on_projection(layer, packed, Rotary(cos, sin, starts[-1:]))

    return call


class TileAttention(Attend):
    """Attention inside tiles of equal size."""

    def __init__(self, layer: Any, tiles: int, rows: int, device: torch.device) -> None:
        starts = torch.arange(
            0, tiles * rows + 1, rows, dtype=torch.int32, device=device
        )
        super().__init__(layer, starts, rows, keep_finite=False)
        self._tiles = tiles

    def through_layer(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return layer(*(each.unflatten(0, (self._tiles, -1)) for each in (q, k, v)))


@dataclass(frozen=True)
class FusedAttention:
    """Projection, rotation, attention and output projection of one block.

    Without rotary tables q and k are taken as they are, or as their norms leave them.
    """

    qkv: Any
    """Linear ``[rows, width] -> [rows, 3 x heads x size]``: all heads of q first."""
    layer: Any
    """vLLM's ``MMEncoderAttention``."""
    proj: Any
    q_norm: Norm | None = None
    """Over all heads of q together."""
    k_norm: Norm | None = None

    def __call__(
        self, x: torch.Tensor, rotary: Rotary | None, attend: Attend
    ) -> torch.Tensor:
        """``[rows, width]`` to add to the residual stream."""
        packed = linear(self.qkv, x)
        if rotary is not None:
            output = attend.on_projection(self.layer, packed, rotary)
            return linear(self.proj, output)
        parts = packed.chunk(3, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            parts = (self.q_norm(parts[0]), self.k_norm(parts[1]), parts[2])
        heads = self.layer.num_heads
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in parts)
        return linear(self.proj, attend(self.layer, q, k, v))


def rotate(
    packed: torch.Tensor, heads: int, rotary: Rotary, *, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v ``[rows, heads, size]`` of a packed projection, which may be
    overwritten."""
    if kernels.is_available(packed.device):
        from vllm_encoder_cg.kernels.rotate_heads import rotate_heads
    else:
        rotate_heads = reference.rotate_heads
    return rotate_heads(
        packed,
        rotary.cos,
        rotary.sin,
        heads,
        rotary.row_total,
        interleaved=rotary.interleaved,
        in_place=in_place,
    )
