# SPDX-License-Identifier: Apache-2.0
"""``vllm bench mm-processor`` runs with our manager in its engine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.engines import (
    ADDITIONAL_CONFIG,
    COMPILATION_CONFIG,
    command_line,
    vllm_command,
)

pytestmark = pytest.mark.vllm_e2e

PROMPTS, WARMUPS = 4, 1


def test_mm_processor_encodes_by_graph(sample_checkpoint: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = vllm_command("bench", "mm-processor", "--model", str(sample_checkpoint))
    command += command_line(
        compilation_config=COMPILATION_CONFIG,
        additional_config=ADDITIONAL_CONFIG,
        limit_mm_per_prompt={"image": 1, "video": 0},
        num_prompts=PROMPTS,
        num_warmups=WARMUPS,
        random_input_len=8,
        random_output_len=2,
        random_mm_base_items_per_request=1,
        random_mm_num_mm_items_range_ratio=0.0,
        random_mm_limit_mm_per_prompt={"image": 1, "video": 0},
        random_mm_bucket_config="{(256, 320, 1): 1.0}",
        output_json=str(results),
        disable_tqdm=True,
    )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    assert "encoder_forward_ms" in done.stdout
    measured = json.loads(results.read_text())
    assert measured["completed"] == PROMPTS
    assert measured["mm_processor_stats"]["encoder_forward_ms"]["mean"] > 0
    assert "active for Qwen3VLForConditionalGeneration" in output
    lines = re.findall(r"Encoder CUDA graphs: Items: (\d+), Hit rate: 100.0%", output)
    assert lines and int(lines[-1]) == PROMPTS + WARMUPS, output[-6000:]
