# SPDX-License-Identifier: Apache-2.0
"""What benchmark scripts share: a time limit, files, and a last line.  Imports no
torch of itself.

A script that is ended early has lost nothing but what was running: it writes its
results after every step, begins none after ``--stop-after`` seconds, and says last
what it found, in one line that ``benchmarks/run_all`` repeats.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

VERDICT = "verdict: "
"""How the last line of a script begins."""


def prepare_environment() -> None:
    """For vLLM in this process and those that it starts: nothing is fetched or sent,
    and SIGTERM ends the process as an exception does, so that it ends its own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # A kernel of vLLM's needs it with Triton 3.6.
    os.environ.setdefault("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def python_path(folder: Path) -> str:
    """``PYTHONPATH`` of a process that imports from `folder`, too."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def add_time_limit(parser: argparse.ArgumentParser) -> None:
    """The option ``--stop-after``, which ``Attempts`` takes."""
    parser.add_argument(
        "--stop-after",
        type=float,
        metavar="SECONDS",
        help="begin nothing new after so many seconds",
    )


def write_json(path: Path, content: Any) -> None:
    """At once or not at all; makes the folder.  What JSON lacks becomes text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(content, indent=1, default=str) + "\n")
    draft.replace(path)


class Attempts:
    """Runs one thing after another; one that fails does not end the others.

    Args:
        stop_after: seconds from now after which nothing is begun; None: no limit.
    """

    def __init__(self, stop_after: float | None = None) -> None:
        self._begin = time.monotonic()
        self._stop_after = stop_after
        self._ended = False
        self.problems: list[str] = []
        """What failed, or was not begun."""

    def in_time(self) -> bool:
        """Whether something may still be begun."""
        return not self._ended and (
            self._stop_after is None or self.seconds() < self._stop_after
        )

    def begin_no_more(self) -> None:
        """From now on it is too late for anything."""
        self._ended = True

    def seconds(self) -> float:
        """Since the construction."""
        return time.monotonic() - self._begin

    def run(self, name: str, call: Callable[[], T]) -> T | None:
        """What `call` returns; None where it failed or was not begun, which
        ``problems`` then says."""
        if not self.in_time():
            self.problems.append(f"{name}: not begun, no time left")
            return None
        begin = time.perf_counter()
        result = None
        try:
            result = call()
        except Exception as error:
            traceback.print_exc()
            self.problems.append(f"{name}: {type(error).__name__}: {error}")
        except SystemExit:  # asked to end: what there is is still told
            self.begin_no_more()
            self.problems.append(f"{name}: ended after {self.seconds():.0f} s")
        print(f"{name}: {time.perf_counter() - begin:.0f} s\n", flush=True)
        _give_back()
        return result

    def finish(self, verdict: str) -> int:
        """Prints the problems and the last line; returns the exit code."""
        for problem in self.problems:
            print(problem)
        print(verdict_line(verdict, self.problems), flush=True)
        return int(bool(self.problems))


def verdict_line(verdict: str, problems: Sequence[str] = ()) -> str:
    """One line: what was found, and the first thing that is wrong."""
    if not problems:
        return f"{VERDICT}ok: {verdict}"
    first = " ".join(problems[0].split())[:200]
    return f"{VERDICT}{len(problems)} PROBLEMS: {first}; {verdict}"


def _give_back() -> None:
    """What nothing uses any more, for the next one on this device."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            # An illegal access ends a context for good; what follows tells so, too.
            print(f"the device does not answer: {error}", flush=True)
