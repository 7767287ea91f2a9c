# SPDX-License-Identifier: Apache-2.0
"""Runs the checks in one process and prints a line for each.

::

    python -m benchmarks.gpu_faults --out results [--only WORD ...] [--list]

``--vision released`` (the default on a GPU) has towers of the released sizes; the
whole takes about five minutes on an H200.  Without a GPU, ``--vision small`` runs
those checks that need none.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_encoder_cg.benchmarking.scripts import (
    Attempts,
    add_time_limit,
    prepare_environment,
    write_json,
)


@dataclass
class Outcome:
    """What a check came to."""

    name: str
    passed: bool
    seconds: float
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        word = "PASS" if self.passed else "FAIL"
        reason = f": {self.reason}" if self.reason else ""
        return f"{word}  {self.name} ({self.seconds:.0f} s){reason}"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_faults")
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu-faults"), help="folder of the JSON")
    add("--only", nargs="+", default=[], help="checks whose names contain a word")
    add("--vision", choices=("released", "small"), default="released")
    add("--list", action="store_true", help="print the names and end")
    add_time_limit(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    prepare_environment()
    import torch

    from benchmarks.gpu_faults import (  # noqa: F401 - they add their checks
        capture_checks,
        life_checks,
        replay_checks,
    )
    from benchmarks.gpu_faults.support import CHECKS, Context, Encoders

    chosen = [
        check
        for check in CHECKS
        if (torch.cuda.is_available() or not check.gpu_only)
        and (not options.only or any(word in check.name for word in options.only))
    ]
    if options.list:
        print("\n".join(check.name for check in chosen))
        return 0
    attempts = Attempts(options.stop_after)
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        encoders = Encoders(stack, options.vision)
        for check in chosen:
            outcomes.append(_run(check, Context(encoders), attempts))
            print(outcomes[-1], flush=True)
            # After every check, in case that the next one ends the process.
            write_json(
                options.out / "gpu-faults.json",
                {
                    "device": torch.cuda.get_device_name()
                    if torch.cuda.is_available()
                    else "cpu",
                    "torch": torch.__version__,
                    "checks": [asdict(outcome) for outcome in outcomes],
                },
            )
        print("\n".join(["", *map(str, outcomes)]), flush=True)
        passed = sum(outcome.passed for outcome in outcomes)
        return attempts.finish(f"{passed} of {len(chosen)} checks passed")


def _run(check: Any, context: Any, attempts: Attempts) -> Outcome:
    """One check, and waiting for whatever it left to the device."""
    from benchmarks.gpu_faults.support import settle

    seconds = 0.0

    def run() -> None:
        nonlocal seconds
        begin = time.perf_counter()
        try:
            check.run(context)
            settle()
        finally:
            seconds = time.perf_counter() - begin

    before = len(attempts.problems)
    attempts.run(check.name, run)
    reason = "".join(attempts.problems[before:]).removeprefix(f"{check.name}: ")
    return Outcome(check.name, not reason, seconds, reason, context.figures)


if __name__ == "__main__":
    sys.exit(main())
