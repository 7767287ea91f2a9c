# SPDX-License-Identifier: Apache-2.0
"""What the checks ask of vLLM's workers."""

from __future__ import annotations

import json
from typing import Any


class EncoderChecks:
    """Adds methods to vLLM's workers, as their ``worker_extension_cls``."""

    model_runner: Any
    reload_weights: Any

    def encoder_stats(self) -> dict[str, Any]:
        """The manager's statistics, plain enough for any transport."""
        from vllm_encoder_cg.integration.runners import find_manager

        manager = find_manager(self.model_runner)
        if manager is None:
            return {}
        stats = manager.get_cumulative_stats()
        return json.loads(json.dumps(stats, default=str))

    def encoder_memory_given_back(self) -> dict[str, float]:
        """Bytes that the manager reports, and bytes that ``clear()`` frees."""
        import gc

        import torch

        from vllm_encoder_cg.integration.runners import find_manager

        manager = find_manager(self.model_runner)
        reported = manager.get_cumulative_stats()["graph_memory_bytes"]
        # Only what graphs hold may come back: first give back what is cached.
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        manager.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return {
            "reported": reported,
            "freed": torch.cuda.mem_get_info()[0] - before,
        }

    def save_weights(self, path: str) -> None:
        """Every parameter, under the model's own names."""
        from safetensors.torch import save_file

        parameters = self.model_runner.get_model().named_parameters()
        save_file(
            {name: each.detach().cpu().clone() for name, each in parameters}, path
        )

    def load_saved_weights(self, path: str) -> None:
        """Reloads in place, as vLLM does for weights from a trainer."""
        import torch
        from safetensors.torch import load_file

        weights = iter(load_file(path).items())
        with torch.no_grad():
            self.reload_weights(weights_iterator=weights, is_checkpoint_format=False)

    def encoder_capture_again(self) -> int:
        """Captures anew, as vLLM does; returns the number of graphs."""
        import torch
        from vllm.distributed.parallel_state import graph_capture

        from vllm_encoder_cg.integration.runners import find_manager

        manager = find_manager(self.model_runner)
        with torch.inference_mode(), graph_capture(device=manager.device):
            manager.capture(torch.cuda.graph_pool_handle())
        return int(manager.get_cumulative_stats()["num_budgets"])
