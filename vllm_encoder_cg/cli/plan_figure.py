# SPDX-License-Identifier: Apache-2.0
"""The figure of ``plan``: how many tokens replays hold, and the budgets for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

_BINS_PER_DOUBLING = 8


def draw(
    file: Path,
    demands: Mapping[str, Mapping[int, float]],
    ladders: Mapping[str, Mapping[str, Sequence[int]]],
) -> None:
    """Draws one column per path.

    Args:
        demands: per path, tokens of a replay -> how often.
        ladders: by name, budgets per path; the first is the proposal.
    """
    figure = Figure(figsize=(8 * len(demands), 4.5))
    axes = figure.subplots(
        2, len(demands), squeeze=False, sharex="col", height_ratios=(3, 1)
    )
    for column, (path, of_path) in enumerate(demands.items()):
        histogram, budgets = axes[0][column], axes[1][column]
        tokens = sorted(of_path)
        weights = [of_path[t] for t in tokens]
        total = sum(weights) or 1.0
        histogram.hist(
            tokens,
            bins=_bins(tokens),
            weights=[100 * weight / total for weight in weights],
            color="#9db8d6",
        )
        for i, of_ladder in enumerate(ladders.values()):
            values = list(of_ladder[path])
            budgets.eventplot(
                [v for v in values if v], lineoffsets=-i, linelengths=0.7, color=f"C{i}"
            )
            if i == 0:
                for value in values:
                    histogram.axvline(value, color="C0", linewidth=0.6, alpha=0.7)
        budgets.set_yticks([-i for i in range(len(ladders))], list(ladders))
        histogram.set_xscale("log", base=2)
        histogram.set_ylabel("share of replays (%)")
        budgets.set_xlabel(
            "output tokens" + (f", path {path}" if len(demands) > 1 else "")
        )
    figure.suptitle("Tokens of a replay, and token budgets", fontsize="medium")
    figure.savefig(file, dpi=120, bbox_inches="tight")


def _bins(tokens: Sequence[int]) -> list[float]:
    """Of equal width on a logarithmic axis."""
    low = math.floor(math.log2(max(1, tokens[0]))) if tokens else 0
    high = math.ceil(math.log2(tokens[-1] + 1)) if tokens else 1
    count = max(1, (high - low) * _BINS_PER_DOUBLING)
    return [2 ** (low + i * (high - low) / count) for i in range(count + 1)]
