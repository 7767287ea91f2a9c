# SPDX-License-Identifier: Apache-2.0
"""Encoders on ranks: a checkpoint of a known size, built, captured."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mm_processor.workloads import REFERENCE_GRAPHS

QWEN3 = "Qwen3VLForConditionalGeneration"
INTERNVL = "InternVLChatModel"
DEEPSEEK = "DeepseekOCRForCausalLM"
ARCHITECTURES = (QWEN3, INTERNVL, DEEPSEEK)

IN_TREE_GRAPHS = {
    "released": REFERENCE_GRAPHS,
    "small": REFERENCE_GRAPHS | {"encoder_cudagraph_token_budgets": [64, 128, 256]},
}
"""Of ``compilation_config``, by the size of the tower."""

MAX_TOKENS = {
    "released": {QWEN3: 8192, INTERNVL: 4096, DEEPSEEK: 1024},
    "small": {QWEN3: 256, INTERNVL: 256, DEEPSEEK: 1024},
}
"""Largest budget; the largest images of the correctness part are above it."""


@dataclass(frozen=True)
class Encoder:
    """Which encoder the ranks share, and how."""

    architecture: str
    mode: str
    """"data" or "weights"."""
    vision: str = "released"
    backend: str | None = None
    videos: bool = True
    """Without, as the reference design's workload has it."""

    def __str__(self) -> str:
        return f"{self.architecture}, {self.mode}, {self.backend or 'default backend'}"


def write_encoder(encoder: Encoder, ranks: int, folder: Path) -> Path:
    """A checkpoint whose text model, which is not run, splits over `ranks`."""
    from vllm_encoder_cg.samples.checkpoints import write_checkpoint

    path = folder / f"{encoder.architecture}-{encoder.vision}"
    write_checkpoint(encoder.architecture, path, vision=encoder.vision)
    config = json.loads((path / "config.json").read_text())
    for text in (config.get("text_config"), config.get("language_config")):
        if text and text["num_attention_heads"] % ranks:
            heads = next(h for h in (32, 16, 8) if text["hidden_size"] % h == 0)
            text |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_config(encoder: Encoder, ranks: int, checkpoint: Path) -> Any:
    """The ``VllmConfig`` of one rank."""
    from vllm.platforms import current_platform

    from vllm_encoder_cg.samples.checkpoints import engine_kwargs
    from vllm_encoder_cg.samples.model_builder import make_vllm_config

    engine_args = engine_kwargs(encoder.architecture)
    for name in ("max_model_len", "max_num_seqs", "limit_mm_per_prompt", "dtype"):
        engine_args.pop(name, None)
    if not encoder.videos:
        engine_args["limit_mm_per_prompt"] = {"image": 20, "video": 0}
    return make_vllm_config(
        **engine_args,
        model=checkpoint,
        dtype="float32" if current_platform.is_cpu() else "bfloat16",
        attention_backend=encoder.backend,
        settings={"max_graphs": 6} if encoder.vision == "small" else {},
        max_tokens=MAX_TOKENS[encoder.vision][encoder.architecture],
        tensor_parallel_size=ranks,
        # vLLM starts no ranks here, so it need not see a GPU for each.
        distributed_executor_backend="external_launcher" if ranks > 1 else None,
        mm_encoder_tp_mode=encoder.mode,
    )


@contextmanager
def built(encoder: Encoder, ranks: int, checkpoint: Path) -> Iterator[Any]:
    """The manager, not captured yet, around the model on this rank.

    On leaving, graphs and weights are given back.
    """
    import torch
    from vllm.config import set_current_vllm_config

    from vllm_encoder_cg.manager import EncoderCudaGraphManager
    from vllm_encoder_cg.samples.model_builder import build_model, numbered_device

    vllm_config = make_config(encoder, ranks, checkpoint)
    with _small_enough(encoder), set_current_vllm_config(vllm_config):
        manager = EncoderCudaGraphManager(
            vllm_config,
            numbered_device(vllm_config),
            vllm_config.model_config.dtype,
            build_model(vllm_config),
        )
        yield manager
        manager.clear()
        for parameter in manager.model.parameters():
            parameter.data = parameter.data.new_empty(0)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _small_enough(encoder: Encoder) -> AbstractContextManager[None]:
    """Has a tower that vLLM hard-codes at full size built for a CPU."""
    if encoder.vision != "small" or encoder.architecture != DEEPSEEK:
        return nullcontext()
    from tests.support.small_towers import small_deepseek_ocr

    return small_deepseek_ocr()


def capture(manager: Any) -> None:
    """As vLLM's runners do."""
    import torch

    if manager.device.type == "cpu":
        manager.capture()
        return
    from vllm.distributed.parallel_state import graph_capture

    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode(), graph_capture(device=device):
        manager.capture(torch.cuda.graph_pool_handle())


def encode(manager: Any, mm_kwargs: dict[str, Any]) -> list[Any]:
    """As vLLM's runners do."""
    import torch

    with torch.inference_mode():
        outputs = manager.execute(mm_kwargs)
        if outputs is None:
            outputs = manager.model.embed_multimodal(**mm_kwargs)
    return list(outputs)


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
