# SPDX-License-Identifier: Apache-2.0
"""Runs small engines one after the other, without encoder graphs and with them.

A process of its own, since an engine that is shut down takes the process groups
of its process with it::

    python -m tests.support.engine_runs RESULT_FOLDER ARCHITECTURE...
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BUDGETS = [64, 256, 512]
TOKENS = 12


@dataclass
class EngineRun:
    """What one architecture gave."""

    eager: dict[str, list[int]]
    """Greedy tokens without encoder graphs, by prompt."""
    graphs: dict[str, list[int]]
    """With them."""
    hits: dict[str, int]
    """Media encoded by graph, by prompt."""


def prompts(architecture: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Text and media by name."""
    from vllm_encoder_cg.samples.checkpoints import ARCHITECTURES, prompt
    from vllm_encoder_cg.samples.media import make_video, random_image

    sizes = (224, 140), (168, 336), (392, 252)
    pictures = [random_image(*size, seed) for seed, size in enumerate(sizes)]
    video = make_video(6, 84, 112, seed=3)
    result = {
        "image": (prompt(architecture, images=1), {"image": pictures[:1]}),
        "three images": (prompt(architecture, images=3), {"image": pictures}),
    }
    if "video" in ARCHITECTURES[architecture].modalities:
        result["video"] = prompt(architecture, videos=1), {"video": [video]}
        result["images and video"] = (
            prompt(architecture, images=2, videos=1),
            {"image": pictures[1:], "video": [video]},
        )
    return result


def run(architecture: str) -> EngineRun:
    """Starts both engines of one architecture."""
    from vllm_encoder_cg.samples.checkpoints import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(architecture, Path(folder))
        _drop_linear_attention(checkpoint / "config.json")
        eager, none = _generate(architecture, checkpoint, graphs=False)
        assert not any(none.values())
        tokens, hits = _generate(architecture, checkpoint, graphs=True)
    return EngineRun(eager, tokens, hits)


def _drop_linear_attention(path: Path) -> None:
    """Full attention in every layer of the text model: linear attention has no
    float32 kernel on the CPU, and in bfloat16 rounding alone changes tokens."""
    config = json.loads(path.read_text())
    text = config.get("text_config", {})
    if "linear_attention" in text.get("layer_types", ()):
        text["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
        text["full_attention_interval"] = 1
        path.write_text(json.dumps(config))


def _generate(
    architecture: str, checkpoint: Path, graphs: bool
) -> tuple[dict[str, list[int]], dict[str, int]]:
    from vllm import LLM, SamplingParams

    from vllm_encoder_cg.samples.checkpoints import engine_kwargs
    from vllm_encoder_cg.samples.engines import forget_media, manager_of

    arguments = engine_kwargs(
        architecture,
        compilation_config={
            "cudagraph_mm_encoder": graphs,
            "encoder_cudagraph_token_budgets": BUDGETS,
        },
        additional_config={"encoder_cg": {"cost_model": False}},
        max_model_len=2048,
        max_num_batched_tokens=2048,
        seed=0,
        enforce_eager=True,
        enable_prefix_caching=False,
        dtype="float32",
    )
    llm = LLM(model=str(checkpoint), **arguments)
    try:
        manager = manager_of(llm)
        assert (manager is not None) == graphs
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        tokens, hits = {}, {}
        for name, (text, media) in prompts(architecture).items():
            forget_media(llm)
            before = manager.get_cumulative_stats()["graph_hits"] if manager else 0
            request: Any = {"prompt": text, "multi_modal_data": media}
            output = llm.generate(request, sampling, use_tqdm=False)[0]
            tokens[name] = list(output.outputs[0].token_ids)
            after = manager.get_cumulative_stats()["graph_hits"] if manager else 0
            hits[name] = after - before
        return tokens, hits
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def main() -> None:
    """Writes one JSON file per architecture as soon as it is through."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    folder, *architectures = sys.argv[1:]
    for architecture in architectures:
        result = run(architecture)
        Path(folder, f"{architecture}.json").write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
