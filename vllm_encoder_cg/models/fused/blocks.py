# SPDX-License-Identifier: Apache-2.0
"""A transformer block with fused steps, and a stack of them.

The residual stream is carried as two tensors, what it is and what is still to be
added, so that each addition is made by the norm behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_encoder_cg.models.attention_tables import AttentionArguments
from vllm_encoder_cg.models.fused.attention import (
    Attend,
    FusedAttention,
    Rotary,
    SequenceAttention,
)
from vllm_encoder_cg.models.fused.modules import (
    Activation,
    Norm,
    add_residual,
    is_plain,
    linear,
)


@dataclass(frozen=True)
class FusedMlp:
    """Two products with an activation between them."""

    first: Any
    activation: Activation
    second: Any

    @property
    def is_plain(self) -> bool:
        """Whether both products are nothing but weights and biases."""
        return is_plain(self.first) and is_plain(self.second)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.second, self.activation.after(self.first, x))


@dataclass(frozen=True)
class FusedBlock:
    """``x + attention(norm1(x)) * scale1``, then the same with the MLP."""

    norm1: Norm
    attention: FusedAttention
    norm2: Norm
    mlp: FusedMlp
    scale1: torch.Tensor | None = None
    """``[width]``, or None for 1."""
    scale2: torch.Tensor | None = None

    @classmethod
    def of(cls, block: Any, mlp: FusedMlp) -> FusedBlock:
        """Of vLLM's block, whose norms and attention have the names that most towers
        give them."""
        attention = block.attn
        return cls(
            Norm(block.norm1),
            FusedAttention(attention.qkv, attention.attn, attention.proj),
            Norm(block.norm2),
            mlp,
        )


def needs_finite_padding(blocks: Sequence[FusedBlock]) -> bool:
    """Whether what lies in one row may reach another by way of a product, because
    one is not plain: what kernels of quantised or sharded ones do with rows that are
    not finite is not known here."""
    return not all(
        block.mlp.is_plain
        and is_plain(block.attention.qkv)
        and is_plain(block.attention.proj)
        for block in blocks
    )


def sequence_attention(
    blocks: Sequence[FusedBlock], encoder_metadata: dict[str, Any]
) -> SequenceAttention:
    """Of a tower whose blocks all attend inside the same sequences."""
    return SequenceAttention(
        blocks[0].attention.layer,
        AttentionArguments(
            encoder_metadata["cu_seqlens"],
            encoder_metadata["max_seqlen"],
            encoder_metadata.get("sequence_lengths"),
        ),
        keep_finite=needs_finite_padding(blocks),
    )


def run_blocks(
    blocks: Sequence[FusedBlock],
    x: torch.Tensor,
    delta: torch.Tensor | None,
    rotary: Rotary | None,
    attend: Callable[[int], Attend],
    last_norm: Norm | None,
    on_output: Callable[[int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Runs all blocks.

    Args:
        x: ``[rows, width]``, the residual stream.
        delta: what is still to be added to it, or None.
        attend: the attention of a block, by its index.
        last_norm: the norm behind the last block; None: there is none.
        on_output: called with each block's index and output.

    Returns:
        ``[rows, width]``: the last output, through `last_norm`.
    """
    x, normed = blocks[0].norm1.add(x, delta)
    for index, block in enumerate(blocks):
        added = block.attention(normed, rotary, attend(index))
        x, normed = block.norm2.add(x, added, block.scale1)
        added = block.mlp(normed)
        norm = blocks[index + 1].norm1 if index + 1 < len(blocks) else last_norm
        if norm is None:
            x = normed = add_residual(x, added, block.scale2)
        else:
            x, normed = norm.add(x, added, block.scale2)
        if on_output is not None:
            on_output(index, x)
    return normed


def run_alike(
    blocks: Sequence[FusedBlock],
    rows: torch.Tensor,
    attention: Attend,
    last_norm: Norm | None,
) -> torch.Tensor:
    """``run_blocks`` without rotary tables, where all blocks attend alike.

    Args:
        rows: ``[tiles, length, width]``.

    Returns:
        the same shape.
    """
    output = run_blocks(
        blocks, rows.flatten(0, 1), None, None, lambda index: attention, last_norm
    )
    return output.unflatten(0, rows.shape[:2])
