# SPDX-License-Identifier: Apache-2.0
"""Random weights have a real scale, depend on the seed and name alone, and are
the same tensors whatever the tensor-parallel size."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from vllm_encoder_cg.integration import random_weights
from vllm_encoder_cg.integration.random_loader import (
    LOAD_FORMAT,
    register_random_loader,
)
from vllm_encoder_cg.integration.random_weights import fill_with_random_weights

HIDDEN, HEAD_SIZE, HEADS, KV_HEADS, INNER, VOCAB = 64, 16, 4, 2, 96, 100


class PlainTower(nn.Module):
    """What towers have beside vLLM's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, 256, 14)
        self.positions = nn.Parameter(torch.empty(1, 400, 64))
        self.fc = nn.Linear(256, 512)
        self.norm = nn.LayerNorm(256)
        self.ls1 = nn.Parameter(torch.empty(256))
        self.register_buffer("rope_cache", torch.full((4,), 7.0))
        self.register_buffer("std_scale", torch.full((256,), math.nan))


def make_filled_tower(seed: int = 0) -> PlainTower:
    tower = PlainTower()
    fill_with_random_weights(tower, seed)
    return tower


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("patch_embedding.weight", 0.0, 1 / math.sqrt(3 * 14 * 14)),
        ("positions", 0.0, 1 / 8),
        ("fc.weight", 0.0, 1 / 16),
        ("fc.bias", 0.0, 0.02),
        ("norm.weight", 1.0, 0.1),
        ("norm.bias", 0.0, 0.02),
        ("ls1", 1.0, 0.1),
        ("std_scale", 1.0, 0.1),
    ],
)
def test_weights_have_a_real_scale(name: str, mean: float, std: float) -> None:
    values = make_filled_tower().state_dict()[name]
    count = values.numel()
    assert values.mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(count))
    assert values.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * count))


def test_an_activation_keeps_its_scale() -> None:
    tower = make_filled_tower()
    out = tower.fc(torch.randn(64, 256))
    assert 0.8 < out.std().item() < 1.2


def test_computed_buffers_are_left_alone() -> None:
    assert torch.equal(make_filled_tower().rope_cache, torch.full((4,), 7.0))


def test_values_depend_on_seed_and_name_alone() -> None:
    one, two, other = make_filled_tower(1), make_filled_tower(1), make_filled_tower(2)
    alone = nn.Module()
    alone.fc = nn.Linear(256, 512)
    fill_with_random_weights(alone, 1)
    assert torch.equal(one.fc.weight, two.fc.weight)
    assert torch.equal(one.fc.weight, alone.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert not torch.equal(one.norm.weight, one.ls1)


def test_a_lower_precision_gets_the_same_values_rounded() -> None:
    half = PlainTower().to(torch.bfloat16)
    fill_with_random_weights(half)
    assert torch.equal(half.fc.weight, make_filled_tower().fc.weight.bfloat16())


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("meta", torch.float32, "meta device"), ("cpu", torch.int8, "int8")],
)
def test_quantised_parameters_are_refused_by_name(
    device: str, dtype: torch.dtype, reason: str
) -> None:
    tower = PlainTower()
    weight = torch.zeros(512, 256, dtype=dtype, device=device)
    tower.fc.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=rf"fc\.weight.*{reason}"):
        fill_with_random_weights(tower)


def test_registering_twice_gives_one_loader() -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    register_random_loader()
    first = type(get_model_loader(LoadConfig(load_format=LOAD_FORMAT)))
    register_random_loader()
    config = LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config={"seed": 3})
    loader = get_model_loader(config)
    assert type(loader) is first
    assert loader.seed == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"sede": 1}, "sede"), ({"seed": "x"}, "must be an integer, got 'x'")],
)
def test_bad_options_are_named(extra: dict[str, object], message: str) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    register_random_loader()
    config = LoadConfig(load_format=LOAD_FORMAT, model_loader_extra_config=extra)
    with pytest.raises(ValueError, match=message):
        get_model_loader(config)


class ParallelTower(nn.Module):
    """One of each of vLLM's layers that split their weights over ranks."""

    def __init__(self) -> None:
        super().__init__()
        from vllm.model_executor.layers.linear import (
            ColumnParallelLinear,
            MergedColumnParallelLinear,
            QKVParallelLinear,
            ReplicatedLinear,
            RowParallelLinear,
        )
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            VocabParallelEmbedding,
        )
        from vllm.model_executor.model_loader.weight_utils import (
            sharded_weight_loader,
        )
        from vllm.model_executor.utils import set_weight_attrs

        self.qkv = QKVParallelLinear(HIDDEN, HEAD_SIZE, HEADS, KV_HEADS)
        self.gate_up = MergedColumnParallelLinear(HIDDEN, [INNER, INNER])
        self.up = ColumnParallelLinear(HIDDEN, INNER)
        self.down = RowParallelLinear(INNER, HIDDEN)
        self.gate = ReplicatedLinear(HIDDEN, 8)
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN)
        heads = HEADS // self.up.tp_size
        self.A_log = nn.Parameter(torch.empty(heads), requires_grad=False)
        set_weight_attrs(self.A_log, {"weight_loader": sharded_weight_loader(0)})


MakeTower = Callable[[int, int], dict[str, torch.Tensor]]


@pytest.fixture
def make_tower(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTower]:
    """Builds the filled weights of (ranks, rank), without process groups."""
    from vllm.config import VllmConfig, set_current_vllm_config

    def make(ranks: int, rank: int) -> dict[str, torch.Tensor]:
        for module in (
            "model_executor.layers.linear",
            "model_executor.layers.vocab_parallel_embedding",
            "model_executor.model_loader.weight_utils",
            "model_executor.parameter",
        ):
            names = importlib.import_module(f"vllm.{module}")
            for name, value in (("world_size", ranks), ("rank", rank)):
                monkeypatch.setattr(
                    names,
                    f"get_tensor_model_parallel_{name}",
                    lambda value=value: value,
                    raising=False,
                )
        monkeypatch.setattr(random_weights, "_tensor_parallel_size", lambda: ranks)
        tower = ParallelTower()
        fill_with_random_weights(tower)
        return tower.state_dict()

    with set_current_vllm_config(VllmConfig()):
        yield make


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_its_shard_of_one_tensor(
    make_tower: MakeTower, ranks: int
) -> None:
    whole = make_tower(1, 0)
    shards = [make_tower(ranks, rank) for rank in range(ranks)]

    def joined(name: str, dim: int) -> torch.Tensor:
        return torch.cat([shard[name] for shard in shards], dim)

    for name, dim in [("up.weight", 0), ("up.bias", 0), ("down.weight", 1)]:
        assert torch.equal(joined(name, dim), whole[name]), name
    assert torch.equal(joined("A_log", 0), whole["A_log"])
    for name in ("down.bias", "gate.weight"):
        assert all(torch.equal(shard[name], whole[name]) for shard in shards), name

    gates, ups = zip(*(s["gate_up.weight"].chunk(2) for s in shards), strict=True)
    assert torch.equal(torch.cat(gates + ups), whole["gate_up.weight"])

    real_rows = torch.cat([s["embed.weight"] for s in shards])[:VOCAB]
    assert torch.equal(real_rows, whole["embed.weight"][:VOCAB])

    # With more ranks than key-value heads, neighbours share a head.
    kv_heads = max(KV_HEADS // ranks, 1)
    sizes = [size * HEAD_SIZE for size in (HEADS // ranks, kv_heads, kv_heads)]
    queries, keys, values = zip(
        *(s["qkv.weight"].split(sizes) for s in shards), strict=True
    )
    step = max(ranks // KV_HEADS, 1)
    together = torch.cat(queries + keys[::step] + values[::step])
    assert torch.equal(together, whole["qkv.weight"])


def test_merged_layers_scale_each_part_by_the_full_fan_in(
    make_tower: MakeTower,
) -> None:
    weights = make_tower(2, 1)
    assert weights["down.weight"].std().item() == pytest.approx(
        1 / math.sqrt(INNER), rel=0.1
    )
    assert weights["qkv.weight"].std().item() == pytest.approx(
        1 / math.sqrt(HIDDEN), rel=0.1
    )
