# SPDX-License-Identifier: Apache-2.0
"""``vllm.LLM`` with the flag generates what it generates without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import vllm_encoder_cg
from tests.support.engines import (
    ADDITIONAL_CONFIG,
    BUDGETS,
    COMPILATION_CONFIG,
    engine_args,
    generate,
    in_process_engine,
    make_prompts,
)
from vllm_encoder_cg.manager import EncoderCudaGraphManager
from vllm_encoder_cg.samples.chat_media import ChatPrompt, chat_image
from vllm_encoder_cg.samples.engines import manager_of
from vllm_encoder_cg.samples.media import random_image

pytestmark = pytest.mark.vllm_e2e

PROMPTS = {prompt.name: prompt for prompt in make_prompts()}


# Of session scope: see tokens_without_graphs.
@pytest.fixture(scope="session")
def llm(sample_checkpoint: Path) -> Iterator[Any]:
    with in_process_engine(
        sample_checkpoint,
        compilation_config=COMPILATION_CONFIG,
        additional_config=ADDITIONAL_CONFIG,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def manager(llm: Any) -> EncoderCudaGraphManager:
    found = manager_of(llm)
    assert isinstance(found, EncoderCudaGraphManager)
    return found


def counts(manager: EncoderCudaGraphManager) -> tuple[int, int]:
    stats = manager.get_cumulative_stats()
    return stats["graph_hits"], stats["graph_misses"]


def test_compilation_config_reaches_the_manager(
    manager: EncoderCudaGraphManager,
) -> None:
    assert manager.is_captured()
    assert manager.token_budgets == BUDGETS
    assert manager.get_num_graphs_to_capture() == len(BUDGETS)
    assert manager.get_cumulative_stats()["num_budgets"] == len(BUDGETS)
    assert manager.settings.log_every_items == 3


def test_a_wrong_setting_is_raised_by_vllm_llm(sample_checkpoint: Path) -> None:
    """Though the engine would run in a process of its own."""
    from vllm import LLM

    # vLLM asks plug-ins once per process, and another test may have taken this back.
    vllm_encoder_cg.register()
    wrong = {"encoder_cg": {"memory_limit_gib": -1}}
    with pytest.raises(ValueError, match=r"memory_limit_gib: got -1; use a number"):
        LLM(
            model=str(sample_checkpoint),
            compilation_config=COMPILATION_CONFIG,
            additional_config=wrong,
            **engine_args(),
        )


def test_without_the_flag_there_is_no_manager(
    tokens_without_graphs: dict[str, list[int]],
) -> None:
    # The fixture has asserted it; what it generated must depend on the images.
    assert len(set(map(tuple, tokens_without_graphs.values()))) == len(PROMPTS)


@pytest.mark.parametrize(
    ("name", "hits", "misses"),
    [
        ("grace_hopper", 1, 0),
        ("china", 1, 0),
        ("together", 2, 0),
        ("with a video", 3, 0),
        ("above every budget", 1, 1),
    ],
)
def test_tokens_equal_those_without_the_flag(
    name: str,
    hits: int,
    misses: int,
    llm: Any,
    manager: EncoderCudaGraphManager,
    tokens_without_graphs: dict[str, list[int]],
) -> None:
    before = counts(manager)
    assert generate(llm, PROMPTS[name]) == tokens_without_graphs[name]
    after = counts(manager)
    assert (after[0] - before[0], after[1] - before[1]) == (hits, misses)


def test_a_failing_replay_costs_no_request(
    llm: Any,
    manager: EncoderCudaGraphManager,
    tokens_without_graphs: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("replay failed on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(manager.adapter, "fill", fail)
        assert generate(llm, PROMPTS["together"]) == tokens_without_graphs["together"]
    before = counts(manager)
    assert generate(llm, PROMPTS["together"]) == tokens_without_graphs["together"]
    assert counts(manager)[0] == before[0] + 2


def test_requests_together_equal_requests_alone(llm: Any) -> None:
    from vllm import SamplingParams

    from vllm_encoder_cg.samples.engines import forget_media

    prompts = [
        ChatPrompt(str(seed), (chat_image("image", random_image(width, 256, seed)),))
        for seed, width in enumerate((256, 512, 320, 480))
    ]
    alone = [generate(llm, prompt) for prompt in prompts]
    forget_media(llm)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.chat([p.messages for p in prompts], sampling, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == alone


def test_reloaded_weights_are_replayed(
    llm: Any,
    manager: EncoderCudaGraphManager,
    tokens_without_graphs: dict[str, list[int]],
) -> None:
    """By vLLM's own reload, which writes in place: graphs stay and see the values."""
    name, weight = next(iter(manager.model.visual.merger.named_parameters()))
    values = weight.detach().clone()

    def reload(value: torch.Tensor) -> None:
        weights = [(f"visual.merger.{name}", value)]
        options = {"weights_iterator": weights, "is_checkpoint_format": False}
        with torch.no_grad():
            llm.collective_rpc("reload_weights", kwargs=options)

    reload(-3 * values)
    try:
        assert torch.equal(weight, -3 * values)
        hits, _ = counts(manager)
        changed = generate(llm, PROMPTS["china"])
        assert changed != tokens_without_graphs["china"]
        assert counts(manager)[0] == hits + 1
    finally:
        reload(values)
    assert generate(llm, PROMPTS["china"]) == tokens_without_graphs["china"]
    assert manager.get_cumulative_stats()["num_budgets"] == len(BUDGETS)
