# SPDX-License-Identifier: Apache-2.0
"""Which graphs a manager captures (budgets times capture axes, each shape once), and
their groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from vllm_encoder_cg.adapter import EncoderAdapter, GraphShape
from vllm_encoder_cg.definitions import AxisKeys, EncoderCudaGraphConfig, GraphKey
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.planning.budgets import BudgetPlan, resolve_budgets, within_reach
from vllm_encoder_cg.settings import (
    CompilationFields,
    EncoderCgSettings,
    warn_of_duplicates,
)

logger = init_logger(__name__)

MANY_GRAPHS = 64
"""Graphs of one path above which a warning is given, unless the user asked for
more: each takes start-up time, and some memory of its own."""


def plan_budgets(
    adapter: EncoderAdapter, config: EncoderCudaGraphConfig, settings: EncoderCgSettings
) -> BudgetPlan:
    """Budgets and limits under the engine's ``VllmConfig``, which `adapter` has.

    Raises:
        SettingError: a ``CompilationConfig`` field does not fit.
        ValueError: the model's range is invalid.
    """
    vllm_config = adapter.vllm_config
    video_limit = 0
    if "video" in config.modalities:
        multimodal = vllm_config.model_config.multimodal_config
        video_limit = multimodal.get_limit_per_prompt("video")
    fields = CompilationFields.from_compilation_config(vllm_config.compilation_config)
    warn_of_duplicates(vllm_config.compilation_config)
    scheduler = getattr(vllm_config, "scheduler_config", None)
    if scheduler is not None:
        longest = vllm_config.model_config.max_model_len
        fields = within_reach(fields, max(scheduler.max_num_batched_tokens, longest))
    return resolve_budgets(
        fields,
        settings,
        adapter.budget_range(),
        config.paths,
        config.max_frames_per_video,
        video_limit,
        axis_combinations=math.prod(map(len, config.capture_axes)),
    )


def choose_shapes(
    adapter: EncoderAdapter,
    config: EncoderCudaGraphConfig,
    budgets: BudgetPlan,
    max_graphs: int,
) -> list[GraphShape]:
    """The shape of every graph to capture, in the order to capture them: path
    after path, the largest budget first.

    Where several budgets lead to graphs of one capacity (they fall into the same
    number of rows or tiles), only the largest of them is captured: the others
    could never hold less.

    Args:
        max_graphs: the user's limit per path.
    """
    if not config.modalities:
        return []
    _log_axes(adapter, config)
    shapes: list[GraphShape] = []
    for key in budgets.graph_keys(config.capture_axes):
        shape = GraphShape(key, adapter.capacity(key, budgets.limits))
        if not any(_same_graph(shape, other) for other in shapes):
            shapes.append(shape)
    for path, count in Counter(shape.key.path for shape in shapes).items():
        if count > max(MANY_GRAPHS, max_graphs):
            logger.warning(
                "%d encoder CUDA graphs will be captured for path %r (%d token "
                "budgets, each for up to %d layouts), more than %d; give fewer "
                "encoder_cudagraph_token_budgets to start faster and use less memory",
                count,
                path,
                sum(1 for budget in budgets.path_budgets[path] if budget),
                len({s.key.axis_keys for s in shapes if s.key.path == path}),
                max(MANY_GRAPHS, max_graphs),
            )
    return shapes


def _same_graph(shape: GraphShape, other: GraphShape) -> bool:
    return shape.capacity == other.capacity and shape.key.group == other.key.group


def by_group(keys: Iterable[GraphKey]) -> list[list[GraphKey]]:
    """The keys of each group, by ascending budgets."""
    groups: dict[tuple[str, AxisKeys], list[GraphKey]] = {}
    for key in sorted(keys, key=lambda key: key.token_budget):
        groups.setdefault(key.group, []).append(key)
    return list(groups.values())


def _log_axes(adapter: EncoderAdapter, config: EncoderCudaGraphConfig) -> None:
    """Says once which layouts have graphs."""
    if not config.capture_axes:
        return
    names = config.axis_names or ("axis keys",) * len(config.capture_axes)
    axes = "; ".join(
        f"{name}: {', '.join(map(str, keys))}"
        for name, keys in zip(names, config.capture_axes, strict=True)
    )
    logger.info(
        "Encoder CUDA graphs of %s are for these layouts (%s); any other is encoded "
        "eagerly",
        type(adapter.model).__name__,
        axes,
    )
