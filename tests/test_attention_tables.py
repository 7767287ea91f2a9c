# SPDX-License-Identifier: Apache-2.0
"""Sequence tables per attention backend, against loops and against vLLM's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_encoder_cg.models.attention_tables import (
    AttentionArguments,
    CudnnTable,
    FlashTable,
    SdpaTable,
    SequenceTable,
    can_capture,
    make_sequence_table,
)

torch = pytest.importorskip("torch")

ROW_ELEMENTS = 48
GARBAGE = -77
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA", "FLASHINFER")

lengths_lists = st.lists(st.integers(1, 300), min_size=1, max_size=12)
room = st.integers(0, 70)


def filled(
    table: SequenceTable, lengths: list[int]
) -> tuple[AttentionArguments, list[int]]:
    """Attention's arguments and the row offsets, written over garbage."""
    array = np.full(table.length, GARBAGE, dtype=np.int32)
    table.write(lengths, array)
    tensor = torch.from_numpy(array)
    return table.arguments(tensor), table.row_starts(tensor).tolist()


def offsets(lengths: list[int], count: int, scale: int = 1) -> list[int]:
    """`count` + 1 offsets, of which the last real one is repeated."""
    result, position = [0], 0
    for length in lengths:
        position += length * scale
        result.append(position)
    while len(result) < count + 1:
        result.append(position)
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@given(lengths=lengths_lists, more=room, pad=room)
def test_row_starts(backend: str, lengths: list[int], more: int, pad: int) -> None:
    table = make_sequence_table(
        backend, len(lengths) + more, sum(lengths) + pad, ROW_ELEMENTS
    )
    arguments, starts = filled(table, lengths)
    assert starts == offsets(lengths, len(lengths) + more)
    assert GARBAGE not in arguments.cu_seqlens.tolist()
    assert arguments.cu_seqlens.dtype == torch.int32
    assert arguments.max_seqlen.device.type == "cpu"
    assert arguments.max_seqlen.ndim == 0
    assert int(arguments.max_seqlen) >= max(lengths)


@given(lengths=lengths_lists, more=room, pad=room)
def test_flash_repeats_the_last_offset(lengths: list[int], more: int, pad: int) -> None:
    table = FlashTable(len(lengths) + more, sum(lengths) + pad)
    arguments, _ = filled(table, lengths)
    assert arguments.cu_seqlens.tolist() == offsets(lengths, len(lengths) + more)
    assert arguments.sequence_lengths is None


@given(lengths=lengths_lists, more=room, pad=st.integers(0, 5000))
def test_sdpa_covers_every_row_in_short_pieces(
    lengths: list[int], more: int, pad: int
) -> None:
    rows = sum(lengths) + pad
    table = SdpaTable(len(lengths) + more, rows)
    arguments, _ = filled(table, lengths)
    pieces = np.diff(arguments.cu_seqlens.numpy()).tolist()
    assert pieces[: len(lengths)] == lengths
    assert pieces[len(lengths) : len(lengths) + more] == [0] * more
    tail = pieces[len(lengths) + more :]
    assert sum(tail) == pad
    assert min(tail) >= 0 and max(tail) <= max(16, rows // 64 + 1)


@given(lengths=lengths_lists, more=room, pad=room)
def test_cudnn_sections(lengths: list[int], more: int, pad: int) -> None:
    sequences = len(lengths) + more
    table = CudnnTable(sequences, sum(lengths) + pad, ROW_ELEMENTS)
    arguments, _ = filled(table, lengths)
    batch = (len(arguments.cu_seqlens) - 2) // 2
    assert batch >= sequences
    assert batch in (8, 16, 32, 64) or batch % 8 == 0
    q_and_output = offsets(lengths, batch, ROW_ELEMENTS)
    # v lies in the packed projection, whose rows are three times as long.
    v = offsets(lengths, batch, 3 * ROW_ELEMENTS)
    assert arguments.cu_seqlens.tolist() == q_and_output + v
    assert arguments.sequence_lengths is not None
    assert arguments.sequence_lengths.tolist() == [
        *lengths,
        *[0] * (batch - len(lengths)),
    ]


@given(lengths=lengths_lists)
def test_full_cudnn_table_is_what_vllm_passes_eagerly(lengths: list[int]) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention.mm_encoder_attention import (
        MMEncoderAttention,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend, device = AttentionBackendEnum.FLASHINFER, torch.device("cpu")
    starts = np.array(offsets(lengths, len(lengths)), dtype=np.int32)
    arguments, _ = filled(CudnnTable(len(lengths), sum(lengths), ROW_ELEMENTS), lengths)
    expected = MMEncoderAttention.maybe_recompute_cu_seqlens(
        backend, starts, 2 * ROW_ELEMENTS, 2, device
    )
    assert arguments.cu_seqlens.tolist() == expected.tolist()
    expected = MMEncoderAttention.maybe_compute_seq_lens(backend, starts, device)
    assert arguments.sequence_lengths is not None
    assert arguments.sequence_lengths.tolist() == expected.tolist()
    longest = MMEncoderAttention.compute_max_seqlen(backend, starts)
    assert int(arguments.max_seqlen) >= int(longest)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_smaller_batch_leaves_nothing_of_a_larger(backend: str) -> None:
    table = make_sequence_table(backend, 10, 4000, ROW_ELEMENTS)
    array = np.full(table.length, GARBAGE, dtype=np.int32)
    table.write([300] * 10, array)
    table.write([20, 30], array)
    fresh = np.full(table.length, GARBAGE, dtype=np.int32)
    table.write([20, 30], fresh)
    assert array.tolist() == fresh.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_longest_sequence_can_be_bounded(backend: str) -> None:
    bounded = make_sequence_table(backend, 4, 9000, ROW_ELEMENTS, 100)
    free = make_sequence_table(backend, 4, 9000, ROW_ELEMENTS)
    longest = [int(filled(table, [64])[0].max_seqlen) for table in (bounded, free)]
    assert 100 <= longest[0] < longest[1]
    assert longest[1] >= 9000


def test_offsets_beyond_int32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"overflow .* encoder_cudagraph_token_budget"):
        CudnnTable(8, 2**20, 1152)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"NO_SUCH.*FLASH_ATTN, FLASHINFER"):
        make_sequence_table("NO_SUCH", 8, 100, ROW_ELEMENTS)


def test_which_backends_a_gpu_can_capture() -> None:
    assert all(map(can_capture, ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")))
    assert not can_capture("TORCH_SDPA")
