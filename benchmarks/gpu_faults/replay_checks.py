# SPDX-License-Identifier: Apache-2.0
"""Many batches, odd ones, and ones whose pixels are not finite."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_faults.support import (
    GEMMA3,
    INTERNVL,
    MIB,
    QWEN2_5,
    Context,
    assert_close,
    check,
    eager,
    graphs,
    images,
    serve,
    settle,
    some_sizes,
    variant,
)
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.models.registry import adapted_architectures
from vllm_encoder_cg.samples.encoder_inputs import video_batch
from vllm_encoder_cg.startup.rounding import nudge, relative_norm

BATCHES = 2000
NOT_FINITE = {"NaN": float("nan"), "Inf": float("inf")}


@check(f"replay: {BATCHES} random batches, memory flat, all equal to eager")
def many_batches(context: Context) -> None:
    manager = variant(context.encoders.get())
    manager.capture()
    generator = random.Random(0)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    worst, before = 0.0, 0
    batches = BATCHES if torch.cuda.is_available() else 20
    for number in range(batches):
        if number == batches // 10:
            before = _allocated()
        if number % 5 == 4:
            clips = [
                (2 * generator.randint(1, 4), 64, 96)
                for _ in range(generator.randint(1, 3))
            ]
            mm_kwargs = video_batch(manager.adapter, clips, number)
        else:
            mm_kwargs = images(manager, *some_sizes(generator), seed=number)
        outputs = manager.execute(mm_kwargs)
        if outputs is None:  # wholly above every budget
            continue
        expected = eager(manager, mm_kwargs)
        worst = max(worst, assert_close(manager, outputs, expected, f"batch {number}"))
        if number == 1:
            kept += [(output, output.clone()) for output in outputs]
        del outputs, expected, mm_kwargs
    growth = _allocated() - before
    assert all(torch.equal(*pair) for pair in kept), "an early output has changed"
    context.figures |= {
        "error": worst,
        "growth_mib": growth / MIB,
        "hits": manager.stats.hits,
        "misses": manager.stats.misses.total(),
    }
    assert growth <= MIB, "memory grows from batch to batch"
    manager.clear()


def _allocated() -> int:
    settle()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


@check("replay: input that contradicts itself or lies elsewhere")
def odd_input(context: Context) -> None:
    for architecture in (QWEN2_5, GEMMA3):
        manager = context.encoders.get(architecture)
        good = images(manager, (224, 224), (128, 64), seed=1)
        expected = eager(manager, good)
        (name,) = [key for key in good if key.startswith("pixel_values")]
        pixels = good[name]
        strided = torch.stack([pixels, pixels], dim=-1)[..., 0]
        assert not strided.is_contiguous()
        # The same values: whatever takes them must make the same of them.
        for equal in (pixels.cpu(), pixels.float(), strided):
            outputs = manager.execute(good | {name: equal})
            if outputs is not None:
                assert_close(manager, outputs, expected)
        for bad in (
            pixels[:-1],
            torch.cat([pixels, pixels[:1]]),
            pixels[:0],
            pixels.flatten(),
            pixels[..., :-1],
            (pixels * 10).to(torch.int32),
        ):
            assert manager.execute(good | {name: bad}) is None, "bad input was taken"
        assert_close(manager, manager.execute(good), expected, "the next request")


def _isolation(context: Context, manager: EncoderCudaGraphManager) -> None:
    """A bad image in the middle of a batch, then batches after it."""
    sizes = [(224, 96), (320, 224), (96, 160)]
    clean = images(manager, *sizes, seed=3)
    (name,) = [key for key in clean if key.startswith("pixel_values")]
    batch = manager.adapter.parse(clean)
    assert batch is not None
    expected = manager.execute(clean)
    assert expected is not None
    for kind, value in NOT_FINITE.items():
        bad = clean | {name: _spoil(clean[name], batch, value)}
        reference = eager(manager, bad)
        context.figures[f"eager_{kind}_neighbours_finite"] = [
            bool(reference[i].isfinite().all()) for i in (0, 2)
        ]
        before = manager.stats.hits
        outputs = manager.execute(bad)
        assert outputs is not None and manager.stats.hits == before + 3
        for i in (0, 2):
            finite = bool(outputs[i].isfinite().all())
            assert finite, f"{kind} in one image reaches image {i} of its sub-batch"
            assert torch.equal(outputs[i], expected[i]), f"{kind} changes image {i}"
        after = manager.execute(clean)
        assert after is not None
        assert all(map(torch.equal, after, expected)), f"{kind} outlives its request"
        small = images(manager, (64, 64), seed=4)
        assert_close(manager, manager.execute(small), eager(manager, small))


def _spoil(pixels: Any, batch: Any, value: float) -> Any:
    """The pixels with the middle image's replaced by `value`."""
    payload = batch.payload
    if isinstance(pixels, list):  # slices per image
        return [
            [torch.full_like(s, value) for s in slices] if i == 1 else slices
            for i, slices in enumerate(pixels)
        ]
    if hasattr(payload, "tiles"):
        offsets = next(iter(payload.tiles.values())).offsets
    else:
        offsets = payload.row_offsets
    spoilt = pixels.clone()
    spoilt[offsets[1] : offsets[2]] = value
    return spoilt


def _add_isolation(architecture: str, backend: str | None) -> None:
    suffix = f", {backend}" if backend else ""

    @check(f"isolation: NaN and Inf in one image, {architecture}{suffix}")
    def isolation(context: Context) -> None:
        manager = context.encoders.get(
            architecture,
            backend=backend if torch.cuda.is_available() else None,
            mm_device_do_normalize=False,  # pixels of a floating-point type
        )
        _isolation(context, manager)


for _backend in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"):
    _add_isolation(QWEN2_5, _backend)
for _architecture in (
    "Glm4vForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration",
    INTERNVL,
    GEMMA3,
    "Gemma4ForConditionalGeneration",
    "MiniCPMV2_6",
):
    _add_isolation(_architecture, None)


_FORCED_WAITS = {"Gemma4ForConditionalGeneration": 1}
"""Of one batch of images."""


@check("replay: every architecture, without waiting for the device", gpu_only=True)
def no_synchronisation(context: Context) -> None:
    """With the debug mode of PyTorch in which a wait is an error, unless an adapter
    says that vLLM's input leaves no other way, as ``docs/promises.md`` has it."""
    waits: dict[str, str] = {}
    for architecture in adapted_architectures():
        try:
            manager = context.encoders.get(architecture, vision="small", budgets=())
        except Exception as error:  # whose text this vLLM cannot run in small
            context.figures[f"{architecture}, small"] = f"{error}"[:200]
            manager = context.encoders.get(architecture)
        if not manager.is_captured():
            context.figures[architecture] = manager.inactive_reason
            continue
        forced, wait = _find_wait(manager)
        expected = _FORCED_WAITS.get(architecture, 0)
        if wait is None and forced != expected:
            wait = f"{forced} forced waits instead of {expected}"
        context.figures[architecture] = wait or (
            f"{forced} forced, no other" if forced else "no wait"
        )
        if wait is not None:
            waits[architecture] = wait
    assert not waits, f"execute waits for the device: {waits}"


def _find_wait(manager: EncoderCudaGraphManager) -> tuple[int, str | None]:
    """How often a batch was let wait for the device, and any other wait."""
    first = images(manager, (64, 64), (96, 64), seed=0)
    second = images(manager, (128, 96), (64, 96), (64, 64), seed=1)
    assert manager.execute(first) is not None
    torch.cuda.synchronize()
    failed: list[BaseException] = []
    assert manager._executor is not None
    log = manager._executor.log
    count = log.failed

    def note(batch: Any) -> None:
        import sys

        failed.append(sys.exc_info()[1] or RuntimeError("unknown"))
        count(batch)

    log.failed = note  # type: ignore[method-assign]
    forced = 0

    @contextmanager
    def allow() -> Iterator[None]:
        nonlocal forced
        forced += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("error")

    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch("vllm.utils.gpu_sync_debug.gpu_sync_allowed", allow):
            outputs = manager.execute(second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        del log.failed
    if failed:
        return forced, f"{type(failed[0]).__name__}: {failed[0]}"[:200]
    assert outputs is not None
    assert_close(manager, outputs, eager(manager, second))
    return forced, None


@check("refused: fp8 attention of the encoder", gpu_only=True)
def fp8_attention(context: Context) -> None:
    """By us; or by vLLM, where its kernels have none of it (Hopper)."""
    try:
        manager = context.encoders.get(
            vision="small", backend="FLASHINFER", mm_encoder_attn_dtype="fp8"
        )
    except ValueError as error:
        context.figures["reason"] = f"vLLM: {error}"
        assert "mm_encoder_attn_dtype='fp8' requires" in str(error)
        return
    context.figures["reason"] = manager.inactive_reason
    assert not manager.active and "fp8" in (manager.inactive_reason or "")
    assert manager.execute(images(manager, (64, 64))) is None


@check("quantised: fp8 weights give what eager gives", gpu_only=True)
def fp8_weights(context: Context) -> None:
    """Quantised as they are loaded: vLLM's dummy weights, which are then brought to
    a real scale."""
    manager = context.encoders.get(quantization="fp8_per_tensor", load_format="dummy")
    context.figures["reason"] = manager.inactive_reason
    context.figures["layers"] = _give_real_scale(manager.model.visual)
    assert context.figures["layers"] > 0, "nothing of the tower is quantised"
    if manager.active:
        manager.capture()
        context.figures["graphs"] = graphs(manager)
        context.figures["input_rounded"] = manager.adapter.coarseness() > 1
        batch = images(manager, (96, 160), (224, 64))
        grids = batch["image_grid_thw"][:1]
        pixels = batch["pixel_values"][: int(grids.prod())]
        alone = batch | {"pixel_values": pixels, "image_grid_thw": grids}
        expected = eager(manager, batch)
        for name, other in (
            ("eager_nudged", eager(manager, nudge(batch, manager.dtype))),
            ("eager_again", eager(manager, batch)),
        ):
            context.figures[name] = max(map(relative_norm, other, expected))
        context.figures["eager_alone"] = relative_norm(
            eager(manager, alone)[0], expected[0]
        )
        context.figures["error"] = serve(manager)


@torch.no_grad()
def _give_real_scale(tower: torch.nn.Module) -> int:
    """From weights within 0.001 of zero; returns how many layers are quantised."""
    quantised = 0
    for module in tower.modules():
        for name, weight in module.named_parameters(recurse=False):
            if "scale" in name:
                continue
            # A uniform distribution within 0.001 deviates by 0.001 / sqrt(3).
            if weight.dtype is torch.float8_e4m3fn:
                module.weight_scale.mul_(1e3 * (3 / module.input_size) ** 0.5)
                quantised += 1
            elif weight.dim() > 1:
                weight.mul_(1e3 * (3 / weight[0].numel()) ** 0.5)
            elif name == "weight":  # of a norm
                weight.add_(1)
            else:
                weight.mul_(20)
    return quantised


@check("refused: LoRA on the tower")
def tower_lora(context: Context) -> None:
    manager = context.encoders.get(
        vision="small", enable_lora=True, enable_tower_connector_lora=True
    )
    context.figures["reason"] = manager.inactive_reason
    assert not manager.active and "LoRA" in (manager.inactive_reason or "")
    assert manager.execute(images(manager, (64, 64))) is None
