# SPDX-License-Identifier: Apache-2.0
"""Everything that one engine is asked to do."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_encoder_cg.benchmarking.engine_options import shared_gpu_options


def can_use_gpu() -> bool:
    """Whether vLLM runs on CUDA here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def can_sleep() -> bool:
    """Whether this vLLM can put an engine to sleep on this machine."""
    from vllm.device_allocator.cumem import cumem_available

    return bool(cumem_available and can_use_gpu())


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Everything that one engine is asked to do."""
    from vllm import LLM, SamplingParams

    from vllm_encoder_cg.samples.checkpoints import (
        ARCHITECTURES,
        engine_kwargs,
        prompt,
        write_checkpoint,
    )
    from vllm_encoder_cg.samples.media import random_image

    name = job["architecture"]
    with tempfile.TemporaryDirectory(prefix="engine-check-") as folder:
        arguments = engine_kwargs(name) | shared_gpu_options(graphs=job["graphs"])
        arguments |= {
            "model": str(write_checkpoint(name, Path(folder), vision=job["vision"])),
            "dtype": "bfloat16" if can_use_gpu() else "float32",
            "enable_prefix_caching": False,
            "mm_processor_cache_gb": 0,
            "seed": 0,
        }
        if job["backend"]:
            arguments["mm_encoder_attn_backend"] = job["backend"]
        if job["graphs"]:
            arguments["enable_sleep_mode"] = can_sleep()
        begin = time.perf_counter()
        llm = LLM(
            **arguments,
            worker_extension_cls="benchmarks.engine_check.worker.EncoderChecks",
        )
        seconds = time.perf_counter() - begin
        sizes = [(336, 336), (640, 480), (512, 768), (896, 448)]
        requests = [
            {
                "prompt": prompt(name, images=count),
                "multi_modal_data": {
                    "image": [random_image(w, h, seed=i) for i, (w, h) in picked]
                },
            }
            for count in (1, 2, 4)
            for picked in [list(enumerate(sizes))[:count]]
        ]
        if "video" in ARCHITECTURES[name].modalities:
            from vllm_encoder_cg.samples.media import make_video

            requests.append(
                {
                    "prompt": prompt(name, videos=1),
                    "multi_modal_data": {"video": make_video(8, 224, 224, seed=9)},
                }
            )
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

        def generate() -> list[list[int]]:
            llm.llm_engine.reset_encoder_cache()
            outputs = llm.generate(requests, sampling, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        found: dict[str, Any] = {"tokens": {"first": generate()}}
        found["seconds"] = round(seconds, 1)
        if not job["graphs"]:
            return found
        found["stats"] = llm.collective_rpc("encoder_stats")[0]
        found["stages"] = {}
        found["memory"] = None

        def stage(title: str, change: Any) -> None:
            try:
                result = change()
                before = llm.collective_rpc("encoder_stats")[0]
                found["tokens"][title] = generate()
                after = llm.collective_rpc("encoder_stats")[0]
                hits = after["graph_hits"] - before["graph_hits"]
                found["stages"][title] = f"{hits} hits"
                if title == "cleared":
                    found["memory"] = result
            except Exception as error:
                found["stages"][title] = f"{type(error).__name__}: {error}"[:300]
                found["tokens"][title] = []

        weights = str(Path(folder) / "weights.safetensors")
        llm.collective_rpc("save_weights", args=(weights,))

        def reload() -> None:
            llm.collective_rpc("load_saved_weights", args=(weights,))

        def sleep(level: int) -> None:
            for attempts_left in (2, 1, 0):
                try:
                    llm.sleep(level)
                except Exception:
                    # vLLM's worker finds that another process took memory meanwhile,
                    # when it is already asleep; its engine takes it to be awake.
                    llm.collective_rpc("wake_up")
                    if not attempts_left:
                        raise
                else:
                    break
                finally:
                    # Else the next request waits for ever.
                    llm.wake_up()
            if level == 2:
                reload()

        stage("again", lambda: None)
        stage("reloaded", reload)
        if arguments["enable_sleep_mode"]:
            stage("slept", lambda: sleep(1))
            stage("slept at level 2", lambda: sleep(2))
        stage("cleared", lambda: llm.collective_rpc("encoder_memory_given_back")[0])
        stage("captured again", lambda: llm.collective_rpc("encoder_capture_again")[0])
        return found
