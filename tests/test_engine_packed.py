# SPDX-License-Identifier: Apache-2.0
"""``vllm.LLM`` with packed towers: the same tokens with encoder graphs as without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_runs import EngineRun

pytestmark = pytest.mark.vllm_e2e

ROOT = Path(__file__).parents[1]
VIDEO_MODELS = [
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration",
]
MODELS = [*VIDEO_MODELS, "KimiVLForConditionalGeneration"]
#: Models this small gain nothing from a second thread.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
IMAGE_HITS = {"image": 1, "three images": 3}
VIDEO_HITS = {"video": 1, "images and video": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """All engines, one after the other in one process; what an engine that fails
    keeps the later ones from is missing."""
    folder = tmp_path_factory.mktemp("engines")
    command = [sys.executable, "-m", "tests.support.engine_runs", str(folder), *MODELS]
    with (folder / "log").open("wb") as log:
        code = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | ONE_THREAD,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=800,
        ).returncode
    if code:
        print((folder / "log").read_text()[-6000:])
    return {
        path.stem: EngineRun(**json.loads(path.read_text()))
        for path in folder.glob("*.json")
    }


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_the_same(model: str, runs: dict[str, EngineRun]) -> None:
    run = runs[model]
    assert run.graphs == run.eager


@pytest.mark.parametrize("model", MODELS)
def test_tokens_depend_on_the_media(model: str, runs: dict[str, EngineRun]) -> None:
    tokens = runs[model].eager.values()
    assert len(set(map(tuple, tokens))) == len(tokens)


@pytest.mark.parametrize("model", MODELS)
def test_every_image_and_video_goes_by_graph(
    model: str, runs: dict[str, EngineRun]
) -> None:
    videos = VIDEO_HITS if model in VIDEO_MODELS else {}
    assert runs[model].hits == IMAGE_HITS | videos
