# SPDX-License-Identifier: Apache-2.0
"""vLLM's model loader ``load_format="encoder_cg_random"`` (``random_weights.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_encoder_cg.integration.random_weights import fill_with_random_weights

if TYPE_CHECKING:
    from torch import nn

LOAD_FORMAT = "encoder_cg_random"


def register_random_loader() -> None:
    """Register the loader with vLLM as ``load_format="encoder_cg_random"``.

    Takes ``model_loader_extra_config={"seed": int}``; the seed is 0 by default.
    Calling it again changes nothing.
    """
    from vllm.model_executor import model_loader

    registered = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if LOAD_FORMAT not in registered:
        model_loader.register_model_loader(LOAD_FORMAT)(_make_loader_class())


def _answer_capture_query_without_cuda() -> None:
    """Let ``torch.cuda.is_current_stream_capturing()`` say False without a driver.

    A torch built for CUDA raises there on a machine without a CUDA driver, while
    a CPU build says False. The resamplers of vLLM's MiniCPM-V models ask on every
    call. It can go when vLLM asks its platform instead. Where CUDA is available
    nothing is changed.
    """
    import torch

    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = lambda: False


def _make_loader_class() -> type:
    """Build the loader class; a function because its base class needs vLLM."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomModelLoader(BaseModelLoader):
        """Loads random weights; ``load_model`` of the base post-processes them."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self.seed = _read_seed(load_config.model_loader_extra_config)

        def download_model(self, model_config: Any) -> None:
            """Nothing to download."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            if model_config.quantization is not None:
                raise ValueError(
                    f"load_format {LOAD_FORMAT!r} makes unquantised weights, but "
                    f"quantization is {model_config.quantization!r}; leave "
                    "quantization out."
                )
            _answer_capture_query_without_cuda()
            fill_with_random_weights(model, self.seed)
            # MiniCPM-V's own load_weights does this too: the resampler's table of
            # positions is made on the host.
            move = getattr(model, "_ensure_resampler_device", None)
            if move is not None:
                move()

    return RandomModelLoader


def _read_seed(extra_config: Any) -> int:
    options = dict(extra_config or {})
    seed = options.pop("seed", 0)
    if options:
        raise ValueError(
            f"model_loader_extra_config has unknown keys {sorted(options)} for "
            f"load_format {LOAD_FORMAT!r}; it takes only 'seed'."
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(
            f"model_loader_extra_config['seed'] must be an integer, got {seed!r}."
        )
    return seed
