# SPDX-License-Identifier: Apache-2.0
"""Weights that change, several managers, several streams, an engine that sleeps."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_faults.support import (
    GEMMA3,
    QWEN2_5,
    QWEN3,
    Context,
    assert_close,
    check,
    eager,
    graphs,
    images,
    serve,
    some_sizes,
    variant,
)
from vllm_encoder_cg.startup.rounding import relative_norm

# -- Weights -------------------------------------------------------------------


@check("weights: written in place, seen by the next replay")
def written_weights(context: Context) -> None:
    manager = context.encoders.get()
    mm_kwargs = images(manager, (224, 224), (96, 64))
    before = manager.execute(mm_kwargs)
    weight = next(manager.model.visual.merger.parameters())
    values = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(-3)
    try:
        manager.check_weights(manager.model)
        after = manager.execute(mm_kwargs)
        context.figures["error"] = assert_close(
            manager, after, eager(manager, mm_kwargs)
        )
        assert before is not None and after is not None
        change = relative_norm(after[0], before[0])
        assert change > 0.1, f"the embedding changed by {change:.1e} only"
    finally:
        with torch.no_grad():
            weight.copy_(values)
    serve(manager)


@check("weights: all written in place, by either forward")
def all_written_weights(context: Context) -> None:
    base = context.encoders.get()
    mm_kwargs = images(base, (224, 224), (96, 64))
    for fused in ("off", "on"):
        manager = variant(base, fused=fused)
        manager.capture()
        places = manager._weights._places
        weights = [place.tensor for place in places if place.tensor is not None]
        saved = [weight.clone() for weight in weights]
        try:
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(1 + 0.2 * torch.rand_like(weight))
            outputs = manager.execute(mm_kwargs)
            context.figures[f"error_{fused}"] = assert_close(
                manager, outputs, eager(manager, mm_kwargs)
            )
        finally:
            with torch.no_grad():
                for weight, values in zip(weights, saved, strict=True):
                    weight.copy_(values)
            manager.clear()


@check("weights: replaced, noticed, and right after capturing again")
def replaced_weights(context: Context) -> None:
    manager = variant(context.encoders.get())
    manager.capture()
    merger = manager.model.visual.merger
    name, weight = next(iter(merger.named_parameters()))
    owner = merger.get_submodule(name.rpartition(".")[0])
    key = name.rpartition(".")[2]
    mm_kwargs = images(manager, (224, 224))
    setattr(owner, key, torch.nn.Parameter(weight.detach() * -3, requires_grad=False))
    try:
        context.figures["batches"] = 0
        while manager.execute(mm_kwargs) is not None:
            context.figures["batches"] += 1
            assert context.figures["batches"] < 200, "stale weights are served"
        assert graphs(manager) == 0
        manager.capture()
        outputs = manager.execute(mm_kwargs)
        context.figures["error"] = assert_close(
            manager, outputs, eager(manager, mm_kwargs)
        )
    finally:
        setattr(owner, key, weight)
        manager.clear()


# -- Several managers -------------------------------------------------------------


@check("managers: two models and two managers of one, in turn")
def several_managers(context: Context) -> None:
    first = context.encoders.get()
    second = variant(first, budgets=(96, 320))
    second.capture()
    third = context.encoders.get(GEMMA3)
    for seed in range(5):
        for manager in (first, second, third):
            serve(manager, seed=seed, batches=1)
    second.clear()
    context.figures["error"] = max(serve(first), serve(third))


# -- Streams ------------------------------------------------------------------------


def _spin(milliseconds: float) -> None:
    """Keeps the current stream busy; about 1.7 million cycles are a millisecond."""
    torch.cuda._sleep(int(milliseconds * 1_700_000))


@check("streams: batches from two streams in turn", gpu_only=True)
def two_streams(context: Context) -> None:
    """Without order between them, the second would write the buffers of the
    first while it is being replayed."""
    manager = context.encoders.get(QWEN2_5)
    sizes = [(640, 640), (480, 320)]
    batches = [images(manager, *sizes, seed=seed) for seed in range(40)]
    expected = [eager(manager, batch) for batch in batches]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outputs = []
    for number, batch in enumerate(batches):
        with torch.cuda.stream(streams[number % 2]):
            outputs.append(manager.execute(batch))
    torch.cuda.synchronize()
    for number, (output, reference) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(manager, output, reference, f"batch {number}")


@check("streams: from a side stream while the default one is busy", gpu_only=True)
def side_stream(context: Context) -> None:
    manager = context.encoders.get(QWEN2_5)
    batches = [images(manager, (320, 320), seed=seed) for seed in range(20)]
    expected = [eager(manager, batch) for batch in batches]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    outputs = []
    for batch in batches:
        _spin(20)
        with torch.cuda.stream(side):
            outputs.append(manager.execute(batch))
    torch.cuda.synchronize()
    for output, reference in zip(outputs, expected, strict=True):
        assert_close(manager, output, reference)
    serve(manager)


@check("streams: pixels that are still being copied", gpu_only=True)
def late_pixels(context: Context) -> None:
    """The host is far ahead: copies, tables and replays are queued behind work."""
    manager = context.encoders.get(QWEN2_5)
    generator = random.Random(1)
    batches = [
        images(manager, *some_sizes(generator, 3), seed=seed) for seed in range(30)
    ]
    expected = [eager(manager, batch) for batch in batches]
    pinned = [batch["pixel_values"].cpu().pin_memory() for batch in batches]
    torch.cuda.synchronize()
    outputs: list[Any] = []
    _spin(100)
    for batch, pixels in zip(batches, pinned, strict=True):
        late = pixels.to("cuda", non_blocking=True)
        outputs.append(manager.execute(batch | {"pixel_values": late}))
        del late
    torch.cuda.synchronize()
    for number, (output, reference) in enumerate(zip(outputs, expected, strict=True)):
        if output is not None:
            assert_close(manager, output, reference, f"batch {number}")


@check("streams: outputs lie in no captured buffer")
def no_alias(context: Context) -> None:
    manager = context.encoders.get()
    arena = manager._graphs.arena
    stores = [*arena._inputs.values(), *arena._outputs.values()]
    spans = [(s.data_ptr(), s.data_ptr() + s.nbytes) for s in stores]
    outputs = manager.execute(images(manager, (224, 224), (96, 64), (64, 64)))
    assert outputs is not None
    for output in outputs:
        address = output.data_ptr()
        assert not any(begin <= address < end for begin, end in spans)


# -- An engine -----------------------------------------------------------------------


@check("engine: sleep, wake and reload", gpu_only=True)
def sleeping_engine(context: Context) -> None:
    """Greedy tokens stay the same, by graph, after each level of sleep."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    import vllm_encoder_cg
    from vllm_encoder_cg.samples.chat_media import ChatPrompt, chat_image
    from vllm_encoder_cg.samples.checkpoints import engine_kwargs, write_checkpoint
    from vllm_encoder_cg.samples.media import random_image

    vllm_encoder_cg.register()
    prompt = ChatPrompt("image", (chat_image("image", random_image(320, 256, 4)),))
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = engine_kwargs(QWEN3) | {
            "model": str(write_checkpoint(QWEN3, Path(folder))),
            "enable_sleep_mode": True,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.2,
            "compilation_config": {
                "cudagraph_mm_encoder": True,
                "encoder_cudagraph_token_budgets": [64, 256],
            },
        }
        llm = LLM(**arguments)
        try:
            _sleep_and_wake(context, llm, prompt, sampling)
        finally:
            llm.llm_engine.engine_core.shutdown()


def _sleep_and_wake(context: Context, llm: Any, prompt: Any, sampling: Any) -> None:
    from vllm_encoder_cg.samples.engines import forget_media, manager_of

    def tokens() -> list[int]:
        forget_media(llm)
        output = llm.chat(prompt.messages, sampling, use_tqdm=False)[0]
        return list(output.outputs[0].token_ids)

    scheduler = llm.llm_engine.vllm_config.scheduler_config
    context.figures["async_scheduling"] = scheduler.async_scheduling
    expected = tokens()
    manager = manager_of(llm)
    assert manager is not None and manager.is_captured()
    weights = dict(manager.model.named_parameters())
    saved = {name: weight.detach().cpu() for name, weight in weights.items()}
    llm.sleep(level=1)
    llm.wake_up()
    assert tokens() == expected, "other tokens after sleep at level 1"
    llm.sleep(level=2)
    llm.wake_up()
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])
    assert tokens() == expected, "other tokens after sleep at level 2"
    stats = manager.get_cumulative_stats()
    context.figures |= {"hits": stats["graph_hits"], "items": stats["items"]}
    assert stats["graph_hits"] == stats["items"] == 3
