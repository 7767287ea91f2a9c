# SPDX-License-Identifier: Apache-2.0
"""vLLM understands the sample checkpoint of every architecture, small and with
the released tower, offline and without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_encoder_cg.samples.checkpoints import (
    ARCHITECTURES,
    engine_kwargs,
    prompt,
    write_checkpoint,
)
from vllm_encoder_cg.samples.definition import VOCAB_SIZE

VIDEO_ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "InternVLChatModel",
    "Gemma4ForConditionalGeneration",
    "MiniCPMV2_6",
    "MiniCPMV4_0",
    "MiniCPMV4_5",
}
IMAGE_ARCHITECTURES = {
    "KimiVLForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Step3VLForConditionalGeneration",
    "DeepseekOCRForCausalLM",
    "MiniCPMV2_5",
}

every_architecture = pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))


@pytest.fixture
def inspected_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps vLLM from importing itself in a subprocess for each model class."""
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())


def make_model_config(architecture: str, folder: Path, **overrides: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    kwargs = engine_kwargs(architecture, **overrides)
    return EngineArgs(model=str(folder), **kwargs).create_model_config()


def test_all_architectures_are_there_with_their_modalities() -> None:
    with_video = {
        name for name, sample in ARCHITECTURES.items() if "video" in sample.modalities
    }
    assert with_video == VIDEO_ARCHITECTURES
    assert set(ARCHITECTURES) == VIDEO_ARCHITECTURES | IMAGE_ARCHITECTURES


@every_architecture
@pytest.mark.parametrize("vision", ["small", "released"])
@pytest.mark.usefixtures("inspected_in_process")
def test_vllm_accepts_the_checkpoint(
    architecture: str, vision: Any, tmp_path: Path
) -> None:
    folder = write_checkpoint(architecture, tmp_path / architecture, vision=vision)
    config = make_model_config(architecture, folder)
    sample = ARCHITECTURES[architecture]
    assert config.architecture == (sample.vllm_architecture or architecture)
    assert config.is_multimodal_model
    assert config.get_vocab_size() == VOCAB_SIZE
    assert config.max_model_len == 8192


@every_architecture
def test_only_the_tower_grows_to_the_released_size(
    architecture: str, tmp_path: Path
) -> None:
    def layers(vision: Any) -> int:
        folder = write_checkpoint(architecture, tmp_path / vision, vision=vision)
        config = json.loads((folder / "config.json").read_text())
        tower = config["vision_config"]
        return tower.get("depth") or tower.get("num_hidden_layers") or 0

    # vLLM fixes the size of DeepSeek-OCR's towers, whatever the configuration.
    if architecture != "DeepseekOCRForCausalLM":
        assert layers("small") <= 3
        assert layers("released") >= 16
    weights = [path for path in tmp_path.rglob("*") if path.stat().st_size > 1e6]
    assert not weights


@every_architecture
def test_the_tokenizer_knows_all_text_and_the_placeholders(
    architecture: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = write_checkpoint(architecture, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == VOCAB_SIZE
    for text in ("Describe this. 12:30 naïve 写真 🙂", "<unfinished|"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    for token in ARCHITECTURES[architecture].special_tokens:
        ids = tokenizer.encode(token, add_special_tokens=False)
        assert len(ids) == 1, token
    assert all(tokenizer.convert_ids_to_tokens(i) for i in range(VOCAB_SIZE))


@every_architecture
def test_the_chat_template_writes_the_same_prompt(
    architecture: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = write_checkpoint(architecture, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    videos = int("video" in ARCHITECTURES[architecture].modalities)
    content = [{"type": "image"}] * 2 + [{"type": "video"}] * videos
    content.append({"type": "text", "text": "Describe this."})
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == prompt(architecture, images=2, videos=videos)


def test_overrides_are_merged_into_dictionaries() -> None:
    kwargs = engine_kwargs(
        "Ernie4_5_VLMoeForConditionalGeneration",
        compilation_config={"cudagraph_mm_encoder": True},
        limit_mm_per_prompt={"video": 0},
        max_model_len=512,
    )
    assert kwargs["compilation_config"]["cudagraph_mm_encoder"] is True
    assert kwargs["limit_mm_per_prompt"] == {"image": 4, "video": 0}
    assert kwargs["max_model_len"] == 512
    assert kwargs["trust_remote_code"] is True


def test_bad_requests_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'Qwen9' has no sample checkpoint"):
        write_checkpoint("Qwen9", tmp_path)
    with pytest.raises(ValueError, match="'small' or 'released', got 'big'"):
        write_checkpoint("MiniCPMV2_6", tmp_path, vision="big")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes no videos, but videos=1"):
        prompt("KimiVLForConditionalGeneration", videos=1)
    with pytest.raises(ValueError, match="images=-1"):
        prompt("MiniCPMV2_6", images=-1)
