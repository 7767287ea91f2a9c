# SPDX-License-Identifier: Apache-2.0
"""An encoder without an engine, captured: for verify, bench and the tests."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm_encoder_cg.manager import EncoderCudaGraphManager

_SMALL_MAX_TOKENS, _MAX_TOKENS = 1024, 16384


@dataclass(frozen=True)
class EncoderOptions:
    """Which encoder, and how it is captured."""

    model: str | None = None
    """A checkpoint; None: a sample of `architecture`."""
    architecture: str | None = None
    vision: Literal["small", "released"] = "small"
    backend: str | None = None
    random_weights: bool = False
    dtype: str | None = None
    """None: float32 on a CPU, otherwise what vLLM chooses."""
    max_tokens: int | None = None
    budgets: tuple[int, ...] = ()
    trust_remote_code: bool = False
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """``additional_config["encoder_cg"]``."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``EngineArgs``."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.architecture is None):
            raise ValueError(
                f"model: got {self.model!r}, architecture: got "
                f"{self.architecture!r}; give either a checkpoint as model, or an "
                "architecture, of which a sample checkpoint is made"
            )

    @property
    def is_small(self) -> bool:
        """Whether it is a sample that a CPU runs in milliseconds."""
        return self.model is None and self.vision == "small"


@contextlib.contextmanager
def captured_encoder(options: EncoderOptions) -> Iterator[EncoderCudaGraphManager]:
    """Builds the model alone and captures its encoder.

    Yields:
        The manager; ``manager.model`` is the model.

    Raises:
        ValueError: the architecture has no sample, or a setting is invalid.
    """
    from vllm.platforms import current_platform

    from vllm_encoder_cg.manager import EncoderCudaGraphManager
    from vllm_encoder_cg.samples.cpu_gaps import without_driver
    from vllm_encoder_cg.samples.model_builder import (
        build_model,
        make_vllm_config,
        numbered_device,
        single_rank,
    )

    on_cpu = current_platform.is_cpu()
    with (
        without_driver() if on_cpu else contextlib.nullcontext(),
        tempfile.TemporaryDirectory(prefix="vllm-encoder-cg-") as folder,
    ):
        engine_args = _engine_args(options, Path(folder))
        engine_args["dtype"] = options.dtype or ("float32" if on_cpu else "auto")
        compilation_config = engine_args.pop("compilation_config", {})
        vllm_config = make_vllm_config(
            **engine_args,
            attention_backend=options.backend,
            compilation_config=compilation_config | _compilation_config(options),
            settings=options.settings,
            seed=options.seed,
            max_tokens=options.max_tokens
            or (_SMALL_MAX_TOKENS if options.is_small else _MAX_TOKENS),
        )
        with single_rank(vllm_config):
            model = build_model(vllm_config)
            manager = EncoderCudaGraphManager(
                vllm_config,
                numbered_device(vllm_config),
                vllm_config.model_config.dtype,
                model,
            )
            manager.capture()
            yield manager


def _engine_args(options: EncoderOptions, folder: Path) -> dict[str, Any]:
    from vllm_encoder_cg.integration.random_loader import LOAD_FORMAT
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs, write_checkpoint

    if options.architecture is None:
        engine_args: dict[str, Any] = {
            "model": options.model,
            "load_format": LOAD_FORMAT if options.random_weights else "auto",
        }
    else:
        engine_args = engine_kwargs(options.architecture)
        # Sized for an engine.
        del engine_args["max_model_len"], engine_args["limit_mm_per_prompt"]
        engine_args["model"] = write_checkpoint(
            options.architecture, folder, vision=options.vision
        )
    if options.trust_remote_code:
        engine_args["trust_remote_code"] = True
    return engine_args | options.engine


def _compilation_config(options: EncoderOptions) -> dict[str, Any]:
    if not options.budgets:
        return {}
    return {"encoder_cudagraph_token_budgets": list(options.budgets)}
