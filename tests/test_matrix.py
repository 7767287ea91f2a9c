# SPDX-License-Identifier: Apache-2.0
"""The compatibility matrix, and the file of what was verified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from benchmarks.record_verified import entry_of, refusal
from vllm_encoder_cg.models.catalog import ADAPTED, SupportedModel
from vllm_encoder_cg.models.matrix import (
    ADAPTER,
    PROTOCOL,
    describe,
    devices,
    matrix_rows,
    verified_on,
)
from vllm_encoder_cg.models.packed_tower import PackedTowerAdapter
from vllm_encoder_cg.models.refusals import varlen_refusal
from vllm_encoder_cg.models.registry import has_fused_forward, load_adapter
from vllm_encoder_cg.models.verified import (
    Verified,
    merge,
    read_verified,
    write_verified,
)
from vllm_encoder_cg.verification import VERIFY_TOLERANCE

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TORCH_SDPA")


def entry(**values: object) -> Verified:
    return Verified.model_validate(
        {
            "architecture": "InternVLChatModel",
            "device": "GPU",
            "vllm": "0.33.0",
            "dtype": "bfloat16",
            "backends": ["FLASH_ATTN"],
            "date": "2026-11-30",
            "tower": "released",
            "cases": 20,
            "worst_error": 0.01,
        }
        | values
    )


@pytest.mark.parametrize("model", ADAPTED, ids=lambda model: model.architecture)
def test_backends_and_fused_forwards_are_those_of_the_adapter(
    model: SupportedModel,
) -> None:
    adapter = load_adapter(model.architecture)
    if issubclass(adapter, PackedTowerAdapter):
        captured = tuple(
            backend
            for backend in BACKENDS
            if varlen_refusal(backend, "cuda", adapter.passes_sequence_lengths) is None
        )
        assert model.backends == captured
    else:
        assert model.backends == ()
    fused = getattr(adapter, "fused_tower", None) is not None
    assert has_fused_forward(model.architecture) == fused


def test_every_model_has_a_row() -> None:
    rows = matrix_rows()
    adapted = [row for row in rows if row.driven_by == ADAPTER]
    assert [row.architecture for row in adapted] == [m.architecture for m in ADAPTED]
    assert all(row.driven_by == PROTOCOL for row in rows[len(adapted) :])
    json.dumps([row.as_dict() for row in rows])


def test_verified_entries_are_of_known_models_and_small_errors() -> None:
    known = {row.architecture for row in matrix_rows()}
    entries = read_verified()
    assert len({e.key for e in entries}) == len(entries)
    for verified in entries:
        assert verified.architecture in known
        # Twice as much where eager differs from itself by nearly as much.
        tolerance = 2 * VERIFY_TOLERANCE[getattr(torch, verified.dtype)]
        assert verified.worst_error <= tolerance
        assert verified.backends and verified.cases


def test_what_was_not_verified_is_unknown() -> None:
    row = next(r for r in matrix_rows() if r.architecture == "InternVLChatModel")
    assert verified_on(row, "no such card") == "unknown"
    assert devices([]) == []
    assert devices(matrix_rows())[-1] == "CPU"
    assert describe(entry()) == "vLLM 0.33.0, FLASH_ATTN: bfloat16 1e-02 (2026-11-30)"
    small = describe(entry(tower="small", worst_error=0.0))
    assert small.endswith("bfloat16 equal, small tower (2026-11-30)")


def test_entries_are_replaced_or_joined() -> None:
    old = entry(date="2026-01-01", worst_error=0.02)
    other = entry(device="CPU")
    assert merge((old, other), (entry(),)) == (entry(), other)
    same_day = entry(backends=["FLASHINFER"], cases=18, worst_error=0.015)
    (joined,) = merge((entry(),), (same_day,))
    assert joined.backends == ("FLASHINFER", "FLASH_ATTN")
    assert (joined.cases, joined.worst_error) == (18, 0.015)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "verified.json"
    write_verified((entry(device="X"), entry()), file)
    assert read_verified(file) == (entry(), entry(device="X"))
    file.write_text(file.read_text().replace("worst_error", "worst"))
    with pytest.raises(ValidationError):
        read_verified(file)


def test_reports_of_a_gpu_check() -> None:
    case = {"case": "a", "ok": True, "hits": 3, "error": 0.004}
    report = {
        "architecture": "InternVLChatModel",
        "attention_backend": "FLASH_ATTN",
        "device": "GPU",
        "dtype": "bfloat16",
        "tower": "released",
        "vllm": "0.33.0",
        "date": "2026-11-30",
        "stats": {"dropped_graphs": []},
        "cases": [case, case | {"error": 0.01}],
    }
    assert refusal(report) is None
    assert entry_of(report) == entry(cases=2)
    assert refusal(report | {"stats": {"dropped_graphs": ["x"]}}) is not None
    assert refusal(report | {"cases": [case | {"ok": False}]}) is not None
    assert refusal(report | {"cases": [case | {"hits": 0}]}) == "nothing was replayed"


def test_models_command() -> None:
    command = [sys.executable, "-m", "vllm_encoder_cg", "models"]
    result = subprocess.run(
        [*command, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    content = json.loads(result.stdout)
    rows = [row.as_dict() for row in matrix_rows()]
    assert content["models"] == json.loads(json.dumps(rows))
    assert content["vllm"]
    table = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        # Python's, without the COLUMNS that readline adds behind its back.
        env=dict(os.environ),
    ).stdout
    for row in matrix_rows():
        assert row.architecture in table
    assert "unknown" in table
