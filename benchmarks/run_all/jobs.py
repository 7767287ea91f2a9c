# SPDX-License-Identifier: Apache-2.0
"""The jobs, in the order in which they are begun."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One line of the table."""

    name: str
    command: str
    """Of Python; ``{out}`` is its folder, ``{seconds}`` what it has."""
    expected_s: float
    """A guess, for one H200 and a cold start."""
    limit_s: float
    alone: bool = True
    """On its GPU."""
    cards: int = 1


_QWEN2 = "Qwen2VLForConditionalGeneration"
_QWEN2_5 = "Qwen2_5_VLForConditionalGeneration"
_QWEN3 = "Qwen3VLForConditionalGeneration"
_QWEN3_5 = "Qwen3_5ForConditionalGeneration"
_GLM = "Glm4vForConditionalGeneration"
_ERNIE = "Ernie4_5_VLMoeForConditionalGeneration"
_KIMI = "KimiVLForConditionalGeneration"
_PACKED = (
    f"{_QWEN2} {_QWEN2_5} {_QWEN2_5}:FLASHINFER {_QWEN3_5} {_QWEN3_5}:FLASHINFER "
    f"{_GLM} {_GLM}:FLASH_ATTN:1:float16 {_ERNIE} {_KIMI}"
)
_INTERNVL = "InternVLChatModel"
_DEEPSEEK = "DeepseekOCRForCausalLM"
_GEMMA3 = "Gemma3ForConditionalGeneration"
_STEP3 = "Step3VLForConditionalGeneration"
_OTHERS = (
    f"{_INTERNVL} {_DEEPSEEK} {_GEMMA3} {_STEP3} Llama4ForConditionalGeneration "
    "Gemma4ForConditionalGeneration MiniCPMV4_5 MiniCPMV2_5 MiniCPMV2_6 MiniCPMV4_0"
)

_LIMITED = "--out {out} --stop-after {seconds}"
_CHECK = f"benchmarks/gpu_check.py {_LIMITED} --random-batches"
_ENGINES = f"-m benchmarks.engine_check {_LIMITED}"
_VERIFY = "-m vllm_encoder_cg verify --vision released --json {out}/verify.json"
_MM = f"-m benchmarks.mm_processor {_LIMITED} --workloads"
_LATENCY = f"benchmarks/encoder_latency.py {_LIMITED} --rounds 10 --limit-s 1.5"
_FUSED = f"-m benchmarks.fused_forward {_LIMITED} --rounds 10"
_RANKS = (
    "-m benchmarks.multi_gpu --output {out} --stop-after {seconds} --ranks 2 --parts"
)

JOBS = (
    # Is it right?
    Job("faults", f"-m benchmarks.gpu_faults {_LIMITED}", 420, 580),
    Job("engine-memory", f"{_ENGINES} --only-graphs --jobs 1", 80, 400),
    Job("engine-tokens", _ENGINES, 80, 400, alone=False),
    Job("serve", f"benchmarks/serve_check.py {_LIMITED}", 90, 300, alone=False),
    Job("verify", f"{_VERIFY} --architecture {_QWEN3} --batches 20", 100, 240, False),
    Job("check-triton", f"{_CHECK} 200 {_QWEN3}:TRITON_ATTN:0", 250, 400, alone=False),
    Job(
        "check-qwen3",
        f"{_CHECK} 200 {_QWEN3}:FLASH_ATTN:0 {_QWEN3} {_QWEN3}:FLASHINFER:0 "
        f"{_QWEN3}:FLASHINFER {_QWEN3}:TRITON_ATTN",
        *(500, 580, False),
    ),
    Job("check-packed", f"{_CHECK} 20 {_PACKED}", 400, 580, alone=False),
    Job("check-others", f"{_CHECK} 20 {_OTHERS}", 400, 580, alone=False),
    # Is it fast?
    Job("mm-mixed", f"{_MM} mixed", 80, 400),
    Job("mm-wide", f"{_MM} wide", 90, 400),
    Job("mm-twenty", f"{_MM} twenty", 100, 400),
    Job("mm-flashinfer", f"{_MM} mixed twenty --backends FLASHINFER", 180, 580),
    Job("latency-qwen3", f"{_LATENCY} {_QWEN3} {_QWEN3}:FLASHINFER", 110, 400),
    Job("latency-packed", f"{_LATENCY} {_QWEN2_5} {_GLM}", 110, 400),
    Job("latency-tiled", f"{_LATENCY} {_INTERNVL} {_DEEPSEEK}", 100, 400),
    Job("latency-padded", f"{_LATENCY} {_GEMMA3} MiniCPMV4_5", 110, 400),
    Job("growth", f"{_LATENCY} --no-cases --growth {_QWEN3}", 150, 400),
    Job(
        "start-up",
        f"{_LATENCY} --no-cases {_QWEN3} {_DEEPSEEK} {_GEMMA3} {_STEP3} {_GLM}",
        *(150, 400),
    ),
    Job("fused", f"{_FUSED} {_KIMI} {_GLM} {_ERNIE}", 300, 580),
    Job("fused-steps", f"{_FUSED} --no-kernel-check --steps {_QWEN3}", 120, 400),
    Job("host-work", f"benchmarks/host_work.py {_LIMITED}", 280, 480),
    Job("staircase", f"benchmarks/replay_staircase.py {_LIMITED}", 80, 240),
    Job("padding-gap", f"benchmarks/padding_gap.py {_LIMITED}", 80, 240),
    Job("step-times", "benchmarks/step_times.py --out {out}", 40, 120),
    # On several GPUs?
    Job("ranks-correctness", f"{_RANKS} correctness", 200, 500, cards=2),
    Job("ranks-timing", f"{_RANKS} timing", 300, 580, cards=2),
    Job("ranks-tokens", f"{_RANKS} tokens", 400, 580, cards=2),
    Job("ranks-mm-processor", f"{_RANKS} mm-processor", 220, 580, cards=2),
)


def chosen_jobs(
    jobs: Sequence[Job], only: Sequence[str], skip: Sequence[str]
) -> list[Job]:
    """Those whose names fit; patterns as a shell has them.

    Raises:
        ValueError: a pattern fits no job.
    """

    def fits(job: Job, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(job.name, pattern) for pattern in patterns)

    for pattern in (*only, *skip):
        if not any(fits(job, [pattern]) for job in jobs):
            raise ValueError(f"no job is named {pattern!r}; --list names them all")
    return [j for j in jobs if (not only or fits(j, only)) and not fits(j, skip)]
