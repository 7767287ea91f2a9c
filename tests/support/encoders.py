# SPDX-License-Identifier: Apache-2.0
"""Small towers, captured on the CPU in float32, for the tests of the adapters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack

from vllm_encoder_cg.samples.captured_encoder import EncoderOptions, captured_encoder
from vllm_encoder_cg.verification import Verifier
from vllm_encoder_cg.verification_cases import Case, default_cases

LARGEST_SIDE = 512
RANDOM_BATCHES = 12

#: Greedy packing over a ladder of few graphs, so that capturing takes a second.
SETTINGS = {"max_graphs": 10, "cost_model": False}


class Encoders:
    """Builds and captures each architecture's encoder once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._verifiers: dict[str, Verifier] = {}

    def get(self, architecture: str) -> Verifier:
        """A verifier whose ``manager`` is captured for the small sample tower."""
        if architecture not in self._verifiers:
            options = EncoderOptions(architecture=architecture, settings=SETTINGS)
            manager = self._stack.enter_context(captured_encoder(options))
            self._verifiers[architecture] = Verifier(manager)
        return self._verifiers[architecture]


@functools.cache
def cases(modalities: Sequence[str], max_items: int = 16) -> list[Case]:
    """The cases that every adapter has to pass, for ``parametrize``.

    Args:
        max_items: at least the manager's; one case has one item more.
    """
    return default_cases(
        modalities,
        max_items,
        largest_side=LARGEST_SIDE,
        random_batches=RANDOM_BATCHES,
    )
