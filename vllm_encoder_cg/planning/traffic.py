# SPDX-License-Identifier: Apache-2.0
"""What an encoder is asked to encode: batches of token counts, and how often."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_encoder_cg.definitions import DEFAULT_PATH, EncoderItemSpec
from vllm_encoder_cg.observability.trace import Trace
from vllm_encoder_cg.planning.sharding import assign_items, weigh_items

ItemTokens = tuple[int, ...]
"""Output tokens of one item, per path."""
BatchTokens = tuple[ItemTokens, ...]
"""The items of a batch, in ascending order."""

_DRAWN_BATCHES = 2000
_TEMPORAL_PATCH = 2
"""Frames of a video that share their tokens, in the Qwen-like towers."""


@dataclass(frozen=True)
class Traffic:
    """Batches of one model, by what they hold."""

    batches: Mapping[BatchTokens, float]
    """How often each came; only ratios matter."""
    min_tokens: int
    """Smallest automatic budget of the model."""
    max_tokens: int
    """Largest automatic budget."""
    paths: Mapping[str, int] = field(default_factory=lambda: {DEFAULT_PATH: 1})
    """Per path, the tokens of one tile."""
    architecture: str | None = None
    recorded_budgets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the graphs while the trace was recorded."""
    recorded_items: int = 0
    """Items per replay, likewise; 0: unknown."""
    recorded_memory_bytes: int = 0
    """That those graphs took; 0: unknown."""

    ranks: int = 1
    """That share the items of each batch."""
    _shares: dict[BatchTokens, list[BatchTokens]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def most_items(self) -> int:
        """That a rank has of a batch."""
        shares = (share for batch in self.batches for share in self.shares(batch))
        return max(map(len, shares), default=0)

    def specs(self, batch: BatchTokens) -> list[EncoderItemSpec]:
        """The batch as a planner takes it."""
        names = list(self.paths)
        if names == [DEFAULT_PATH]:
            return [EncoderItemSpec(tokens, tokens) for (tokens,) in batch]
        return [
            EncoderItemSpec(sum(item), sum(item), dict(zip(names, item, strict=True)))
            for item in batch
        ]

    def shares(self, batch: BatchTokens) -> list[BatchTokens]:
        """What each rank encodes of a batch (``mm_encoder_tp_mode="data"``), balanced
        by tokens; ranks that have nothing are left out."""
        if self.ranks == 1:
            return [batch]
        if batch not in self._shares:
            specs = self.specs(batch)
            assignment = assign_items(specs, self.ranks, weigh_items(specs, None))
            self._shares[batch] = [
                tuple(batch[i] for i in items) for items in assignment.items if items
            ]
        return self._shares[batch]

    def thinned(self, most: int) -> Traffic:
        """With at most `most` distinct batches, evenly chosen."""
        if len(self.batches) <= most:
            return self
        step = math.ceil(len(self.batches) / most)
        return replace(self, batches=dict(sorted(self.batches.items())[::step]))


def traffic_of_trace(trace: Trace) -> Traffic:
    """What trace files recorded."""
    names = trace.path_names
    header = trace.headers[0]
    batches = Counter(
        tuple(sorted(zip(*(batch.tokens_of(path) for path in names), strict=True)))
        for batch in trace.batches
    )
    return Traffic(
        batches={batch: count for batch, count in batches.items() if batch},
        min_tokens=max(1, header.min_tokens),
        max_tokens=max(1, header.max_tokens),
        paths={name: path.granularity for name, path in header.paths.items()},
        architecture=header.architecture,
        recorded_budgets={
            name: tuple(budget for budget in path.budgets if budget)
            for name, path in header.paths.items()
        },
        recorded_items=header.max_items,
        recorded_memory_bytes=max(header.memory_bytes for header in trace.headers),
    )


_ENTRY = re.compile(
    r"(?:(?:video:(?P<frames>\d+)x)?(?P<w>\d+)x(?P<h>\d+)|(?P<tokens>\d+))"
    r"(?:\*(?P<share>\d*\.?\d+))?"
)


def parse_mix(text: str, token_side: int = 32) -> dict[int, float]:
    """Shares by tokens from ``"640x480*0.5,video:16x448x448*0.1,300*0.4"``.

    Args:
        token_side: pixels per side of the square that becomes one output token.

    Raises:
        ValueError: an entry has another form, or a size or share of 0; the message
            names it.
    """
    if token_side < 1:
        raise ValueError(f"token-side: got {token_side}; use at least 1 pixel")
    mix: dict[int, float] = {}
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ValueError(
                f"items: got {entry.strip()!r}; use WIDTHxHEIGHT, "
                "video:FRAMESxWIDTHxHEIGHT or a number of tokens, with *SHARE behind it"
            )
        share = float(match["share"] or 1)
        if match["tokens"]:
            tokens = int(match["tokens"])
        else:
            sides = [max(1, round(int(match[k]) / token_side)) for k in ("w", "h")]
            tokens = sides[0] * sides[1] if int(match["w"]) * int(match["h"]) else 0
            if match["frames"]:
                tokens *= math.ceil(int(match["frames"]) / _TEMPORAL_PATCH)
        if not tokens or not share:
            raise ValueError(
                f"items: got {entry.strip()!r}; sizes and shares are positive"
            )
        mix[tokens] = mix.get(tokens, 0.0) + share
    return mix


def traffic_of_mix(
    mix: Mapping[int, float],
    min_tokens: int,
    max_tokens: int,
    items_per_batch: Sequence[int] = (1,),
    seed: int = 0,
) -> Traffic:
    """Batches of items drawn from a mix.

    Args:
        mix: shares by tokens.
        items_per_batch: numbers of items, equally often; ``(1,)`` is exact, for
            others 2000 batches are drawn.
    """
    if tuple(items_per_batch) == (1,):
        batches: dict[BatchTokens, float] = {((t,),): s for t, s in mix.items()}
    else:
        generator = random.Random(seed)
        drawn = Counter(
            tuple(
                sorted(
                    (tokens,)
                    for tokens in generator.choices(
                        list(mix),
                        list(mix.values()),
                        k=generator.choice(items_per_batch),
                    )
                )
            )
            for _ in range(_DRAWN_BATCHES)
        )
        batches = {batch: float(count) for batch, count in drawn.items()}
    return Traffic(batches, min_tokens, max_tokens)
