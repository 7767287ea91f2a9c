# SPDX-License-Identifier: Apache-2.0
"""``vllm.LLM`` with tiled towers: the same tokens with encoder graphs as without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_runs import EngineRun

pytestmark = pytest.mark.vllm_e2e

ROOT = Path(__file__).parents[1]
INTERNVL = "InternVLChatModel"
MODELS = [
    INTERNVL,
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Step3VLForConditionalGeneration",
    "DeepseekOCRForCausalLM",
]
HITS = {"whole": 1, "cut": 1, "three images": 3}
TIMEOUT_S = 800


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineRun]:
    """All engines, one after the other in one process; what an engine that fails
    keeps the later ones from is missing."""
    folder = tmp_path_factory.mktemp("engines")
    module = "tests.support.tiled_engine_runs"
    command = [sys.executable, "-m", module, str(folder), *MODELS]
    with (folder / "log").open("wb") as log:
        code = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
        ).returncode
    if code:
        print((folder / "log").read_text()[-6000:])
    return {
        path.stem: EngineRun(**json.loads(path.read_text()))
        for path in folder.glob("*.json")
    }


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_the_same(model: str, runs: dict[str, EngineRun]) -> None:
    assert runs[model].graphs == runs[model].eager


@pytest.mark.parametrize("model", MODELS)
def test_tokens_depend_on_the_media(model: str, runs: dict[str, EngineRun]) -> None:
    assert len(set(map(tuple, runs[model].eager.values()))) > 1


@pytest.mark.parametrize("model", MODELS)
def test_every_image_and_video_goes_by_graph(
    model: str, runs: dict[str, EngineRun]
) -> None:
    videos = {"image and video": 2} if model == INTERNVL else {}
    assert runs[model].hits == HITS | videos
