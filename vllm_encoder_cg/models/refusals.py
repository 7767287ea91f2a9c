# SPDX-License-Identifier: Apache-2.0
"""Reasons, common to many towers, why one must not be captured."""

from __future__ import annotations

from typing import Any

import torch

from vllm_encoder_cg import kernels
from vllm_encoder_cg.models.attention_tables import VARLEN_BACKENDS, can_capture


def tower_refusal(tower: Any, vllm_config: Any) -> str | None:
    """What rules out capturing `tower` in this engine, with the remedy.

    - A tower that is not loaded (all its modalities limited to 0, or a later
      pipeline stage) is a placeholder without parameters.
    - LoRA on the tower maps adapters to rows in request order; packing reorders
      and pads rows.
    - fp8 attention with dynamic scales keeps a history on the host that a graph
      cannot advance; static scales are untested on the hardware at hand.
    """
    if tower is None or type(tower).__name__ == "StageMissingLayer":
        return "its vision tower is not loaded on this rank"
    lora = getattr(vllm_config, "lora_config", None)
    if lora is not None and getattr(lora, "enable_tower_connector_lora", False):
        return (
            "LoRA on the vision tower follows the order of requests, which packing "
            "changes; drop enable_tower_connector_lora to use graphs"
        )
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if getattr(multimodal, "mm_encoder_attn_dtype", None) == "fp8":
        return (
            "fp8 encoder attention keeps scaling state that graphs do not update; "
            "leave --mm-encoder-attn-dtype unset to use graphs"
        )
    return None


def varlen_refusal(
    backend: str, device_type: str, passes_sequence_lengths: bool
) -> str | None:
    """What rules out capturing variable-length attention on `backend`.

    Args:
        passes_sequence_lengths: whether the tower gives them to attention;
            cuDNN, behind FLASHINFER, cannot do without.
    """
    if backend == "TORCH_SDPA" and device_type == "cpu":
        return None
    if not can_capture(backend):
        reason = "reads sequence lengths on the host or is not known here"
    elif backend == "FLASHINFER" and not passes_sequence_lengths:
        reason = "needs sequence lengths, which vLLM's tower does not pass on"
    else:
        return None
    remedies = [
        name
        for name in VARLEN_BACKENDS
        if name != "FLASHINFER" or passes_sequence_lengths
    ]
    return (
        f"its attention backend {backend} {reason}; set --mm-encoder-attn-backend to "
        f"one of {', '.join(remedies)} to use graphs"
    )


def pruning_refusal(model: Any) -> str | None:
    """What rules out graphs under video token pruning (EVS, VidCom2)."""
    if getattr(model, "is_multimodal_pruning_enabled", False):
        return (
            "video token pruning makes token counts depend on pixels and appends "
            "columns to image embeddings too; drop --video-pruning-rate to use graphs"
        )
    return None


def fusion_refusal(device: torch.device, vllm_config: Any) -> str | None:
    """What rules out a fused forward on `device` in this engine.

    On a CPU it runs plain operations in place of kernels, for tests.
    """
    import vllm.envs as envs

    if device.type != "cpu" and not kernels.is_available(device):
        return f"there are no kernels for {device.type} here (NVIDIA GPUs, with Triton)"
    if getattr(envs, "VLLM_BATCH_INVARIANT", False):
        return "VLLM_BATCH_INVARIANT asks for vLLM's own kernels"
    if getattr(vllm_config.compilation_config, "compile_mm_encoder", False):
        return "compile_mm_encoder has the encoder's blocks compiled"
    return None
