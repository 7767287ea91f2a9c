# SPDX-License-Identifier: Apache-2.0
"""Token budgets for recorded traffic, and what a planner would do with them."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_encoder_cg.definitions import (
    EncoderCudaGraphPathConfig,
    GraphCapacity,
    GraphKey,
)
from vllm_encoder_cg.planning.budget_search import (
    Demands,
    GraphMemory,
    Limits,
    choose_budgets,
)
from vllm_encoder_cg.planning.budgets import resolve_budgets, round_up
from vllm_encoder_cg.planning.costs import CostModel, TokenCosts, plan_cost
from vllm_encoder_cg.planning.planner import Planner
from vllm_encoder_cg.planning.traffic import Traffic
from vllm_encoder_cg.settings import CompilationFields, EncoderCgSettings

UNMEASURED = TokenCosts(per_eager=32768.0)
"""Costs where nothing was measured: whatever fits a graph goes by graph, and
padding is what remains to be saved."""

_BYTES_PER_TOKEN = 200 * 1024
_BYTES_PER_GRAPH = 4 * 2**20
"""As a 27-layer tower of width 1152 shows in bfloat16."""

_FEWEST_ITEMS, _MOST_ITEMS = 8, 64
_ROUNDS = 4


@dataclass(frozen=True)
class Ladder:
    """Budgets per path, and how many items a replay takes."""

    budgets: Mapping[str, tuple[int, ...]]
    """Ascending."""
    max_items: int

    @property
    def graphs(self) -> int:
        return sum(map(len, self.budgets.values()))


@dataclass
class Outcome:
    """What became of the traffic, on all ranks together; counts are weighted by how
    often batches came."""

    batches: float = 0.0
    items: float = 0.0
    hits: float = 0.0
    replays: float = 0.0
    eager_calls: float = 0.0
    real_tokens: float = 0.0
    """Of replays."""
    padded_tokens: float = 0.0
    cost: float = 0.0
    """Of all batches, each on its slowest rank, in the unit of the cost model."""
    demands: dict[str, dict[int, float]] = field(default_factory=dict, repr=False)
    """Per path, tokens of a replay or an eager call -> how often."""

    @property
    def padding(self) -> float:
        """Share of the replayed tokens."""
        computed = self.real_tokens + self.padded_tokens
        return self.padded_tokens / computed if computed else 0.0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.items if self.items else 0.0


def simulate(traffic: Traffic, ladder: Ladder, costs: CostModel) -> Outcome:
    """Plans every batch for the graphs of `ladder`, as a manager would."""
    capacities = {
        GraphKey(path, budget): GraphCapacity(
            round_up(budget, traffic.paths[path]), ladder.max_items
        )
        for path, budgets in ladder.budgets.items()
        for budget in budgets
    }
    planner = Planner(capacities, tuple(traffic.paths), costs=costs)
    outcome = Outcome(demands={path: {} for path in traffic.paths})
    for batch, weight in traffic.batches.items():
        outcome.batches += weight
        outcome.items += weight * len(batch)
        plans = [planner.plan(traffic.specs(s)) for s in traffic.shares(batch)]
        outcome.cost += weight * max(plan_cost(plan, costs) for plan in plans)
        for sub_batch in (s for plan in plans for s in plan.sub_batches):
            reasons = len(sub_batch.eager_reasons)
            outcome.hits += weight * (len(sub_batch.indices) - reasons)
            for path, step in sub_batch.steps.items():
                of_path = outcome.demands[path]
                of_path[step.tokens] = of_path.get(step.tokens, 0.0) + weight
                if step.key is None:
                    outcome.eager_calls += weight
                    continue
                outcome.replays += weight
                outcome.real_tokens += weight * step.tokens
                padded = capacities[step.key].tokens - step.tokens
                outcome.padded_tokens += weight * padded
    return outcome


@dataclass(frozen=True)
class ProposalLimits:
    """What a user allows."""

    max_graphs: int = 64
    """Per path."""
    memory_gib: float | None = None
    max_items: int | None = None
    """Items per replay; None: the largest recorded batch, between 8 and 64."""
    largest: int | None = None
    """A budget that there must be, for items larger than any recorded."""


def propose(
    traffic: Traffic,
    limits: ProposalLimits,
    costs: CostModel,
    memory: GraphMemory,
) -> tuple[Ladder, Outcome]:
    """The best budgets that were found, and their outcome.

    The search is exact for given demands.  How a batch is cut into replays depends
    on the budgets, though, so it is repeated on the demands of the last result, and
    the ladders that would be captured without a proposal are tried, too.

    Args:
        memory: per path.

    Raises:
        ValueError: the traffic is empty, or a limit cannot be met.
    """
    if not traffic.batches:
        raise ValueError("no batch was recorded: nothing to fit budgets to")
    max_items = limits.max_items or min(
        _MOST_ITEMS, max(_FEWEST_ITEMS, traffic.most_items)
    )
    if limits.largest is not None and max_items > limits.largest:
        # No budget may be smaller than the number of items.
        if limits.max_items is not None:
            raise ValueError(
                f"largest: got {limits.largest}, less than max-items, {max_items}; an "
                "item has at least one token"
            )
        max_items = limits.largest
    bytes_allowed = math.inf if limits.memory_gib is None else limits.memory_gib * 2**30
    paths = len(traffic.paths)
    whole = GraphMemory(memory.bytes_per_token * paths, memory.bytes_per_graph * paths)
    largest = limits.largest or _largest(traffic, whole, bytes_allowed, max_items)
    search = Limits(
        max_graphs=limits.max_graphs,
        smallest=min(max_items, largest),
        largest=largest,
        keep_largest=limits.largest is not None,
        granularity=math.gcd(*traffic.paths.values()),
        memory=whole,
        memory_bytes=bytes_allowed,
    )
    needed = limits.largest or search.smallest
    if whole.bytes_of(needed, 1) > bytes_allowed:
        raise ValueError(
            f"memory-gib: got {limits.memory_gib}; a graph of {needed} tokens alone "
            f"takes about {whole.bytes_of(needed, 1) / 2**30:.3f} GiB"
        )
    first = Ladder(dict.fromkeys(traffic.paths, (largest,)), max_items)
    demands = simulate(traffic, first, costs).demands
    candidates = [
        ladder
        for ladder in known_ladders(traffic, limits.max_graphs).values()
        if _allowed(ladder, limits, memory, bytes_allowed)
    ]
    tried = [(ladder, simulate(traffic, ladder, costs)) for ladder in candidates]
    seen: set[tuple[int, ...]] = set()
    replays = {path: _CheapestReplay(path, costs, largest) for path in traffic.paths}
    for _ in range(_ROUNDS):
        choice = choose_budgets(_priced(demands, replays, costs), search)
        if not choice.budgets or choice.budgets in seen:
            break
        seen.add(choice.budgets)
        for budgets in _variants(choice.budgets, list(replays.values())):
            ladder = Ladder(dict.fromkeys(traffic.paths, budgets), max_items)
            if memory_of(ladder, memory) <= bytes_allowed:
                tried.append((ladder, simulate(traffic, ladder, costs)))
        demands = tried[-1][1].demands
    useful = [entry for entry in tried if entry[1].replays]
    if not useful:
        raise ValueError(
            "no graph helps this traffic: all of it is above the largest budget "
            f"allowed ({largest} tokens), or cheaper eagerly"
        )
    return min(useful, key=lambda entry: (entry[1].cost, entry[0].graphs))


def known_ladders(traffic: Traffic, max_graphs: int = 64) -> dict[str, Ladder]:
    """What is captured without budgets of one's own, by the name of the ladder."""
    paths = {
        name: EncoderCudaGraphPathConfig(
            min_token_budget=min(tile, traffic.max_tokens) if tile > 1 else None,
            token_granularity=tile,
        )
        for name, tile in traffic.paths.items()
    }
    ladders = {}
    for name in ("power_of_two", "fine"):
        plan = resolve_budgets(
            CompilationFields(),
            EncoderCgSettings(ladder=name, max_graphs=max_graphs),
            (min(traffic.min_tokens, traffic.max_tokens), traffic.max_tokens),
            paths,
            1,
            None,
        )
        ladders[name] = Ladder(plan.path_budgets, plan.limits.max_items)
    return ladders


def estimate_memory(
    budgets: Mapping[str, Sequence[int]] | None = None, memory_bytes: int = 0
) -> GraphMemory:
    """Memory of the graphs of one path, from what those of `budgets` took; without,
    a guess."""
    graphs = sum(map(len, (budgets or {}).values()))
    largest = sum(max(of_path, default=0) for of_path in (budgets or {}).values())
    rest = memory_bytes - graphs * _BYTES_PER_GRAPH
    if rest <= 0 or not largest:
        return GraphMemory(_BYTES_PER_TOKEN, _BYTES_PER_GRAPH)
    return GraphMemory(rest / largest, _BYTES_PER_GRAPH)


def memory_of(ladder: Ladder, memory: GraphMemory) -> float:
    """Bytes of all graphs of a ladder."""
    return sum(
        memory.bytes_of(budgets[-1], len(budgets))
        for budgets in ladder.budgets.values()
        if budgets
    )


def _largest(
    traffic: Traffic, memory: GraphMemory, bytes_allowed: float, max_items: int
) -> int:
    """The largest budget worth searching."""
    room = (bytes_allowed - memory.bytes_per_graph) / memory.bytes_per_token
    return max(max_items, int(min(traffic.max_tokens, room)))


def _allowed(
    ladder: Ladder, limits: ProposalLimits, memory: GraphMemory, bytes_allowed: float
) -> bool:
    """Whether a ladder that was not searched keeps the limits, and is one list."""
    lists = list(ladder.budgets.values())
    return (
        all(budgets == lists[0] for budgets in lists)
        and len(lists[0]) <= limits.max_graphs
        and (limits.max_items is None or ladder.max_items == limits.max_items)
        and (limits.largest is None or limits.largest in lists[0])
        and memory_of(ladder, memory) <= bytes_allowed
    )


class _CheapestReplay:
    """The cheapest graph that holds a number of tokens, which may be a larger one:
    matrix products of some sizes are slower than of larger ones."""

    def __init__(self, path: str, costs: CostModel, largest: int) -> None:
        self._path, self._costs = path, costs
        # Between two measured budgets a time is interpolated, so that none is
        # lower there than at both.
        measured = {
            key.token_budget
            for key in getattr(costs, "replay_ms", ())
            if key.path == path and key.token_budget <= largest
        }
        self._measured = sorted(measured)
        self._best = [
            min(self._measured[i:], key=self._cost) for i in range(len(self._measured))
        ]

    def _cost(self, budget: int) -> float:
        return self._costs.replay_cost(GraphKey(self._path, budget))

    def budget(self, tokens: int) -> int:
        """Of that graph."""
        i = bisect_left(self._measured, tokens)
        if i == len(self._best):
            return tokens
        return min(tokens, self._best[i], key=self._cost)

    def cost(self, tokens: int) -> float:
        """Of one replay of it; not lower for more tokens."""
        return self._cost(self.budget(tokens))


def _priced(
    demands: Mapping[str, Mapping[int, float]],
    replays: Mapping[str, _CheapestReplay],
    costs: CostModel,
) -> list[Demands]:
    return [
        Demands(
            demands[path],
            replays[path].cost,
            functools.partial(costs.eager_cost, path),
        )
        for path in demands
    ]


def _variants(
    budgets: tuple[int, ...], replays: Sequence[_CheapestReplay]
) -> list[tuple[int, ...]]:
    """`budgets`, and where each is replaced by a cheaper larger one, those."""
    cheapest = {replay.budget(b) for b in budgets for replay in replays}
    if len(cheapest) > len(budgets) or cheapest == set(budgets):
        return [budgets]
    return [budgets, tuple(sorted(cheapest))]
