# SPDX-License-Identifier: Apache-2.0
"""The ``vllm`` command, which waits before it asks its engine for the first time.

::

    python -m benchmarks.mm_processor.gate FOLDER OPTIONS-OF-VLLM ...

Makes ``FOLDER/ready`` when its ``LLM`` and the requests are there, and goes on when
there is ``FOLDER/go``: engines may start beside each other and still be timed alone.
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

    LLM.chat = wait_before(LLM.chat, folder)
    vllm_main()


def wait_before(chat: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """The method, of which the first call waits."""

    @functools.wraps(chat)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not (folder / READY).exists():
            (folder / READY).touch()
            while not (folder / GO).exists():
                time.sleep(0.05)
        return chat(*args, **kwargs)

    return wrapper


if __name__ == "__main__":
    main()
