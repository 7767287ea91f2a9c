# SPDX-License-Identifier: Apache-2.0
"""Attention of a fused block, on a packed projection.

``SequenceAttention`` is made once per forward and serves all of its layers.  Where
FlashAttention runs, it calls the kernel that vLLM's ``MMEncoderAttention`` wraps, on
q, k and v as they lie in the projection, and leaves out what that wrapper does for
each layer anew: clearing the output (rows behind the last sequence are cleared in q,
k and v instead, see ``kernels.rotate_heads``), and making offsets.  Other backends
are called through vLLM's layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_encoder_cg import kernels
from vllm_encoder_cg.kernels import reference
from vllm_encoder_cg.models.attention_tables import AttentionArguments
from vllm_encoder_cg.models.fused.modules import Norm, is_exactly, linear


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


class SequenceAttention:
    """Attention inside the sequences of one table.

    Args:
        layer: an ``MMEncoderAttention``; all of the tower are alike.
        arguments: what vLLM's layer is called with.
        keep_finite: whether rows behind the last sequence must be finite in the
            output too, because something looks at all rows together.
    """

    splits: ClassVar[int] = 1
    """Parts in which FlashAttention 3 reads keys; more need a kernel to combine
    them.  0: as it chooses itself."""
    direct: ClassVar[bool] = True
    """Whether to call FlashAttention itself, where it is the backend."""
    share_schedule: ClassVar[bool] = False
    """Whether FlashAttention 3 schedules once for all layers."""

    def __init__(
        self, layer: Any, arguments: AttentionArguments, *, keep_finite: bool = False
    ) -> None:
        self._arguments = arguments
        self._direct = (
            self.direct
            and is_exactly(layer, "MMEncoderAttention")
            and layer.attn_backend.name == "FLASH_ATTN"
            and not getattr(layer, "fp8_enabled", False)
            and kernels.is_available(arguments.cu_seqlens.device)
        )
        self.reads_packed = layer.attn_backend.name != "FLASHINFER"
        """Whether q and k may be read where they lie in the projection; cuDNN takes
        contiguous ones."""
        if not self._direct:
            return
        self._make_output = torch.zeros if keep_finite else torch.empty
        self._max_seqlen = int(arguments.max_seqlen)
        self._options: dict[str, Any] = {}
        if layer._fa_version is not None:
            self._options["fa_version"] = layer._fa_version
        if layer._fa_version == 3:
            self._options["num_splits"] = self.splits
            if self.share_schedule:
                self._options["scheduler_metadata"] = self._schedule(layer)

    def _schedule(self, layer: Any) -> torch.Tensor:
        from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

        starts = self._arguments.cu_seqlens
        return get_scheduler_metadata(
            batch_size=len(starts) - 1,
            max_seqlen_q=self._max_seqlen,
            max_seqlen_k=self._max_seqlen,
            num_heads_q=layer.num_heads,
            num_heads_kv=layer.num_kv_heads,
            headdim=layer.head_size,
            cache_seqlens=starts[1:] - starts[:-1],
            qkv_dtype=layer.dtype,
            cu_seqlens_q=starts,
            num_splits=self.splits,
        )

    def __call__(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """``[rows, heads x size]`` from three tensors ``[rows, heads, size]``."""
        arguments = self._arguments
        if not self._direct:
            output = layer(
                query=q.unsqueeze(0),
                key=k.unsqueeze(0),
                value=v.unsqueeze(0),
                cu_seqlens=arguments.cu_seqlens,
                max_seqlen=arguments.max_seqlen,
                sequence_lengths=arguments.sequence_lengths,
            )
            return output.reshape(len(q), -1)
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        output = self._make_output(q.shape, dtype=q.dtype, device=q.device)
        flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=arguments.cu_seqlens,
            cu_seqlens_k=arguments.cu_seqlens,
            max_seqlen_q=self._max_seqlen,
            max_seqlen_k=self._max_seqlen,
            softmax_scale=layer.scale,
            causal=False,
            out=output,
            **self._options,
        )
        return output.flatten(1)


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
        self, x: torch.Tensor, rotary: Rotary | None, sequences: SequenceAttention
    ) -> torch.Tensor:
        """``[rows, width]`` to add to the residual stream."""
        packed = linear(self.qkv, x)
        heads = self.layer.num_heads
        if rotary is not None:
            q, k, v = rotate(packed, heads, rotary, in_place=sequences.reads_packed)
        else:
            parts = packed.chunk(3, dim=-1)
            if self.q_norm is not None and self.k_norm is not None:
                parts = (self.q_norm(parts[0]), self.k_norm(parts[1]), parts[2])
            q, k, v = (part.unflatten(-1, (heads, -1)) for part in parts)
        return linear(self.proj, sequences(self.layer, q, k, v))


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
