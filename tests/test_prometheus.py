# SPDX-License-Identifier: Apache-2.0
"""From the counts of workers to what an API server exposes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from tests.support.toy_adapter import ToyModel, make_items, make_toy_config
from tests.support.toy_manager import make_toy_manager
from vllm_encoder_cg.definitions import EagerReason, GraphKey
from vllm_encoder_cg.integration.environment import METRICS_DIR
from vllm_encoder_cg.observability import prometheus
from vllm_encoder_cg.observability.exposed_metrics import METRICS, Metric, samples
from vllm_encoder_cg.observability.metrics import EncoderStats
from vllm_encoder_cg.observability.metrics_files import (
    FILE_BYTES,
    MetricsFiles,
    open_metrics_files,
)
from vllm_encoder_cg.observability.prometheus import EncoderMetricsCollector

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of another test's registration."""
    prometheus.withdraw_metrics()
    monkeypatch.delenv(METRICS_DIR, raising=False)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    yield
    prometheus.withdraw_metrics()


def expose(registry: CollectorRegistry) -> Values:
    """What a scrape of `registry` reads, of this package's."""
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:encoder_cudagraph_")
    }


def read(folder: Path) -> Values:
    registry = CollectorRegistry()
    registry.register(EncoderMetricsCollector(folder))
    return expose(registry)


def of(values: Values, name: str, **labels: str) -> float:
    wanted = {"model_name": "toy", "engine": "0"} | labels
    return values[f"vllm:encoder_cudagraph_{name}", tuple(sorted(wanted.items()))]


def some_stats(hits: int = 3) -> EncoderStats:
    stats = EncoderStats(hits=hits, real_tokens=90, padded_tokens=10, batches=2)
    stats.misses[EagerReason.FAILED] = 1
    stats.replays[GraphKey("default", 64)] = 2
    stats.replays[GraphKey("default", 64, (7,))] = 3
    stats.replay_seconds = 0.25
    stats.graphs = 5
    stats.graph_memory_bytes = 1000
    return stats


# -- Through files ------------------------------------------------------------------


def test_a_scrape_reads_what_was_counted(tmp_path: Path) -> None:
    MetricsFiles(tmp_path, "toy", 0).write(samples(some_stats()))
    values = read(tmp_path)
    assert of(values, "queries_total") == 4
    assert of(values, "hits_total") == 3
    assert of(values, "misses_total", reason="failed") == 1
    assert of(values, "misses_total", reason="above_every_budget") == 0
    assert of(values, "replays_total", path="default", token_budget="64") == 5
    assert of(values, "real_tokens_total") == 90
    assert of(values, "padded_tokens_total") == 10
    assert of(values, "batches_total") == 2
    assert of(values, "eager_calls_total") == 0
    assert of(values, "replay_seconds_total") == 0.25
    assert of(values, "eager_seconds_total") == 0
    assert of(values, "graphs") == 5
    assert of(values, "memory_bytes") == 1000
    exposed = {name.removesuffix("_total") for name, _ in values}
    assert exposed == {metric.name for metric in METRICS}


def test_every_reason_is_there_from_the_start(tmp_path: Path) -> None:
    MetricsFiles(tmp_path, "toy", 0).write(samples(EncoderStats()))
    values = read(tmp_path)
    for reason in EagerReason:
        assert of(values, "misses_total", reason=reason.value) == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_counts_follow_each_other(steps: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = MetricsFiles(folder, "toy", 0)
        stats = EncoderStats()
        for step in steps:
            stats.hits += step
            files.write(samples(stats))
            assert of(read(folder), "hits_total") == stats.hits


def test_ranks_are_summed_and_engines_kept_apart(tmp_path: Path) -> None:
    """Gauges are of one rank: two GPUs of 1000 bytes each."""
    for hits in (3, 4):
        MetricsFiles(tmp_path, "toy", 0).write(samples(some_stats(hits)))
    MetricsFiles(tmp_path, "toy", 1).write(samples(some_stats(9)))
    values = read(tmp_path)
    assert of(values, "hits_total") == 7
    assert of(values, "hits_total", engine="1") == 9
    assert of(values, "memory_bytes") == 1000


def test_a_later_label_joins_in(tmp_path: Path) -> None:
    """A budget is replayed for the first time long after the start."""
    files = MetricsFiles(tmp_path, "toy", 0)
    stats = some_stats()
    files.write(samples(stats))
    for budget in range(1, 501):  # beyond the first page of a file
        stats.replays[GraphKey("default", budget)] += 1
    files.write(samples(stats))
    values = read(tmp_path)
    assert of(values, "replays_total", path="default", token_budget="500") == 1
    assert of(values, "hits_total") == 3


def test_files_have_their_size_from_the_start(tmp_path: Path) -> None:
    """A page that is mapped and has no room on the disk ends the process."""
    files = MetricsFiles(tmp_path, "toy", 0)
    stats = some_stats()
    for budget in range(3000):
        stats.replays[GraphKey("default", budget)] += 1
        files.write(samples(stats))
    for path in tmp_path.iterdir():
        assert path.stat().st_size == FILE_BYTES
        assert path.stat().st_blocks * 512 >= FILE_BYTES
    values = read(tmp_path)
    assert of(values, "hits_total") == 3
    assert 800 < len(values) < 3000


def test_vllm_s_multiprocess_registry_reads_the_same(tmp_path: Path) -> None:
    """What several API servers serve; beside a file of vLLM's own."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    code = (
        "import prometheus_client as p\n"
        "p.Counter('vllm:requests', 'of vLLM', ['engine']).labels('0').inc()"
    )
    subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, timeout=60
    )
    MetricsFiles(tmp_path, "toy", 0).write(samples(some_stats()))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    assert expose(registry) == read(tmp_path)
    assert registry.get_sample_value("vllm:requests_total", {"engine": "0"}) == 1


# -- In the documentation -----------------------------------------------------------

DOCUMENT = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_metric_is_documented_as_it_is(metric: Metric) -> None:
    exposed = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    cells = [f"`{exposed}`", metric.kind, labels, metric.help]
    assert f"| {' | '.join(cells)} |".replace("|  |", "| |") in DOCUMENT


@pytest.mark.parametrize("reason", EagerReason)
def test_each_reason_is_documented(reason: EagerReason) -> None:
    assert f"| `{reason.value}` | " in DOCUMENT


def test_each_statistic_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in make_toy_manager(monkeypatch).get_cumulative_stats():
        assert f"`{key}`" in DOCUMENT, key


# -- In workers ---------------------------------------------------------------------


def test_without_a_reader_nothing_is_written() -> None:
    assert open_metrics_files(make_toy_config()) is None


def test_vllm_s_folder_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, name in ((ours, METRICS_DIR), (theirs, "PROMETHEUS_MULTIPROC_DIR")):
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    assert open_metrics_files(make_toy_config()) is not None
    assert list(theirs.iterdir()) and not list(ours.iterdir())


def test_a_worker_on_another_host_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(METRICS_DIR, str(tmp_path / "elsewhere"))
    assert open_metrics_files(make_toy_config()) is None
    assert "is not on this host" in package_log.text
    assert not (tmp_path / "elsewhere").exists()


def test_a_manager_writes_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METRICS_DIR, str(tmp_path))
    manager = make_toy_manager(monkeypatch, ToyModel())
    manager.execute(make_items((1, 8), (2, 8)))
    manager.log_final_stats()
    values = read(tmp_path)
    assert of(values, "hits_total") == 2
    assert of(values, "graphs") == manager.get_cumulative_stats()["num_budgets"]


def test_a_folder_that_vanishes_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METRICS_DIR, str(tmp_path))
    manager = make_toy_manager(monkeypatch, ToyModel())
    for file in tmp_path.iterdir():
        file.unlink()
    assert manager.execute(make_items((1, 8))) is not None
    manager.log_final_stats()


# -- In API servers -----------------------------------------------------------------


def folder_named() -> Path:
    return Path(os.environ[METRICS_DIR])


def test_the_default_registry_shows_what_workers_count() -> None:
    prometheus.offer_metrics()
    prometheus.offer_metrics()
    assert expose(prometheus_client.REGISTRY) == {}
    MetricsFiles(folder_named(), "toy", 0).write(samples(some_stats()))
    assert of(expose(prometheus_client.REGISTRY), "hits_total") == 3


def test_it_survives_vllm_s_own_registration() -> None:
    """``PrometheusStatLogger`` takes every collector named ``vllm:`` away."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    prometheus.offer_metrics()
    MetricsFiles(folder_named(), "toy", 0).write(samples(some_stats()))
    unregister_vllm_metrics()
    assert of(expose(prometheus_client.REGISTRY), "hits_total") == 3


def test_llm_get_metrics_has_them() -> None:
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    prometheus.offer_metrics()
    MetricsFiles(folder_named(), "toy", 0).write(samples(some_stats()))
    found = {
        metric.name: metric
        for metric in get_metrics_snapshot()
        if metric.labels.get("model_name") == "toy"
    }
    hits = found["vllm:encoder_cudagraph_hits"]
    assert isinstance(hits, Counter) and hits.value == 3


def test_a_scrape_can_name_a_metric() -> None:
    prometheus.offer_metrics()
    MetricsFiles(folder_named(), "toy", 0).write(samples(some_stats()))
    names = ["vllm:encoder_cudagraph_hits_total"]
    chosen: Any = prometheus_client.REGISTRY.restricted_registry(names)
    assert {name for name, _ in expose(chosen)} == set(names)


def test_unreadable_files_do_not_break_a_scrape(
    package_log: pytest.LogCaptureFixture,
) -> None:
    prometheus.offer_metrics()
    (folder_named() / "counter_1.db").write_bytes(b"torn")
    for _ in range(2):
        assert expose(prometheus_client.REGISTRY) == {}
    warnings = [r for r in package_log.records if r.levelname == "WARNING"]
    assert len(warnings) == 1


def _report(queue: Any) -> None:
    """In a process that a server starts."""
    prometheus.offer_metrics()
    MetricsFiles(folder_named(), "toy", 0).write(samples(some_stats()))
    queue.put(os.environ[METRICS_DIR])


def test_a_worker_process_shares_its_server_s_folder() -> None:
    prometheus.offer_metrics()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_report, args=(queue,))
    process.start()
    assert queue.get(timeout=120) == str(folder_named())
    process.join(60)
    assert folder_named().is_dir(), "who made it removes it"
    assert of(expose(prometheus_client.REGISTRY), "hits_total") == 3
