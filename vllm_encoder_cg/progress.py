# SPDX-License-Identifier: Apache-2.0
"""Progress bars for work that takes seconds, where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_DELAY_S = 1.0
"""Work that is over sooner shows nothing."""


def track(steps: Sequence[T], description: str, shown: bool = True) -> Iterator[T]:
    """`steps`, with a bar on standard error while they are worked on, as vLLM shows
    one for its own graphs; only where that is a terminal.

    Args:
        shown: whether this process is the one to show it: the first rank.
    """
    if not (shown and steps and sys.stderr.isatty()):
        yield from steps
        return
    # Of vLLM's requirements; without a terminal it is not needed.
    from tqdm import tqdm

    yield from tqdm(steps, desc=description, delay=_DELAY_S, leave=False)
