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
import json
import os
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    # Nothing is fetched; a kernel of vLLM's needs the second with Triton 3.6.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    import torch

    from benchmarks.gpu_faults import (  # noqa: F401 - they add their checks
        capture_checks,
        life_checks,
        replay_checks,
    )
    from benchmarks.gpu_faults.support import CHECKS, Context, Encoders, settle

    chosen = [
        check
        for check in CHECKS
        if (torch.cuda.is_available() or not check.gpu_only)
        and (not options.only or any(word in check.name for word in options.only))
    ]
    if options.list:
        print("\n".join(check.name for check in chosen))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        encoders = Encoders(stack, options.vision)
        for check in chosen:
            context = Context(encoders)
            begin = time.perf_counter()
            reason = ""
            try:
                check.run(context)
                settle()
            except Exception as error:
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - begin
            outcomes.append(
                Outcome(check.name, not reason, seconds, reason, context.figures)
            )
            print(outcomes[-1], flush=True)
            _write(options.out, outcomes)
    print("\n".join(["", *map(str, outcomes)]), flush=True)
    return int(not all(outcome.passed for outcome in outcomes))


def _write(folder: Path, outcomes: list[Outcome]) -> None:
    """After every check, in case that the next one ends the process."""
    import torch

    report = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "checks": [asdict(outcome) for outcome in outcomes],
    }
    path = folder / "gpu-faults.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
