# SPDX-License-Identifier: Apache-2.0
"""The ``vllm`` command, whose engine waits once it has started.

::

    python -m benchmarks.mm_processor.gate FOLDER OPTIONS-OF-VLLM ...

Makes ``FOLDER/ready`` when its ``LLM`` is there, and goes on when there is
``FOLDER/go``: engines may start beside each other and still be timed alone.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

READY, GO = "ready", "go"


def main() -> None:
    folder = Path(sys.argv[1])
    sys.argv = ["vllm", *sys.argv[2:]]

    from vllm import LLM
    from vllm.entrypoints.cli.main import main as vllm_main

    LLM.__init__ = wait_after(LLM.__init__, folder)
    vllm_main()


def wait_after(construct: Callable[..., None], folder: Path) -> Callable[..., None]:
    """A constructor that waits at its end."""

    @functools.wraps(construct)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        construct(*args, **kwargs)
        (folder / READY).touch()
        while not (folder / GO).exists():
            time.sleep(0.05)

    return wrapper


if __name__ == "__main__":
    main()
