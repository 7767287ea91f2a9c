# SPDX-License-Identifier: Apache-2.0
"""When a manager says what, and that saying it never disturbs."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.toy_adapter import ToyModel, make_items, make_toy_config
from tests.support.toy_manager import make_toy_manager
from vllm_encoder_cg.integration.environment import METRICS_DIR
from vllm_encoder_cg.observability import reporter as reporter_module
from vllm_encoder_cg.observability.metrics import EncoderStats
from vllm_encoder_cg.observability.reporter import Reporter
from vllm_encoder_cg.observability.trace import read_trace
from vllm_encoder_cg.planning.planner import Plan
from vllm_encoder_cg.settings import EncoderCgSettings

LINE = "Encoder CUDA graphs: Items:"


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METRICS_DIR, raising=False)


def make_reporter(stats: EncoderStats, every: int) -> Reporter:
    settings = EncoderCgSettings(log_every_items=every)
    return Reporter(make_toy_config(), settings, stats)


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _other_tests_threads() -> None:
    """Managers of other tests, whose encoders are kept, have theirs."""
    _earlier.clear()
    _earlier.update(threading.enumerate())


def threads() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "encoder-cg-reporter" and thread not in _earlier
    ]


# -- Lines ------------------------------------------------------------------------


@given(
    st.integers(1, 50),
    st.lists(st.integers(0, 120), max_size=30),
)
def test_a_line_each_n_items_whatever_the_batches(
    every: int, batches: list[int]
) -> None:
    """Never later than with the batch by which there are N more than at the last
    line: a count that must be met exactly can be skipped for ever."""
    lines: list[int] = []
    stats = EncoderStats()
    reporter = make_reporter(stats, every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reporter_module,
            "logger",
            SimpleNamespace(info=lambda *_: lines.append(stats.items)),
        )
        last = 0
        for items in batches:
            stats.hits += items
            reporter.encoded(Plan(()))
            if stats.items - last >= every:
                assert lines[-1:] == [stats.items]
                last = stats.items
        expected = len(lines)
        reporter.close()
        reporter.close()
    assert len(lines) == expected + bool(stats.items)


@pytest.mark.parametrize("way", ["refused", "fails", "eagerly", "stale"])
def test_lines_come_without_any_replay_too(
    way: str, monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    manager = make_toy_manager(monkeypatch, log_every_items=2)
    parsed = {"refused": lambda _: None, "fails": lambda _: 1 / 0}
    if way in parsed:
        monkeypatch.setattr(manager.adapter, "parse", parsed[way])
    elif way == "stale":
        manager.check_weights(ToyModel())
    for _ in range(4):
        assert manager.execute(make_items((1, 5))) is None  # a width without graphs
    assert package_log.text.count(LINE) == 2


def test_zero_means_only_at_shutdown(package_log: pytest.LogCaptureFixture) -> None:
    stats = EncoderStats()
    reporter = make_reporter(stats, 0)
    stats.hits = 10**6
    reporter.encoded(Plan(()))
    assert LINE not in package_log.text
    reporter.close()
    assert package_log.text.count(LINE) == 1


def test_a_manager_that_encoded_nothing_says_nothing(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    make_toy_manager(monkeypatch).log_final_stats()
    assert LINE not in package_log.text


def test_ranks_that_repeat_the_first_say_nothing(
    package_log: pytest.LogCaptureFixture,
) -> None:
    for share_items in (False, True):
        reporter = Reporter(
            make_toy_config(),
            EncoderCgSettings(),
            EncoderStats(hits=5),
            speaks_for_all=False,
            share_items=share_items,
        )
        reporter.close()
        assert package_log.text.count(LINE) == int(share_items)


def test_the_table_comes_with_each_line_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    manager = make_toy_manager(monkeypatch, cudagraph_metrics=True, log_every_items=2)
    for _ in range(3):
        manager.execute(make_items((1, 8)))
    manager.log_final_stats()
    text = package_log.text
    assert text.count(LINE) == text.count("**Encoder CUDAGraph Stats:**") == 2
    assert "- Token budgets (whole): [2, 4, 8]" in text
    assert "| whole | 1               | 2             | 1            | FULL" in text


def test_without_the_flag_there_is_no_table(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture
) -> None:
    manager = make_toy_manager(monkeypatch)
    manager.execute(make_items((1, 8)))
    manager.log_final_stats()
    assert "CUDAGraph Stats" not in package_log.text


# -- Files ------------------------------------------------------------------------


def test_a_manager_traces_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_toy_manager(monkeypatch, trace_file=str(tmp_path / "t.jsonl"))
    manager.execute(make_items((1, 8), (3, 4)))
    manager.execute(make_items((99, 8)))  # above every budget
    manager.execute(make_items((0, 5)))  # a width without graphs
    manager.log_final_stats()
    trace = read_trace(tmp_path)
    assert [batch.tokens for batch in trace.batches] == [(2, 4), (100,), (1,)]
    assert [batch.tokens_of("parts") for batch in trace.batches] == [
        (1, 3),
        (99,),
        (0,),
    ]
    (header,) = trace.headers
    assert header.architecture == "ToyModel"
    assert header.paths["whole"].budgets == (2, 4, 8)


def test_a_batch_that_fails_is_traced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_toy_manager(monkeypatch, trace_file=str(tmp_path / "t.jsonl"))

    def fail(*_: Any) -> None:
        raise RuntimeError("of the test")

    monkeypatch.setattr(manager.adapter, "assemble", fail)
    assert manager.execute(make_items((1, 8))) is None
    manager.log_final_stats()
    assert read_trace(tmp_path).items == 1


def test_a_trace_needs_a_folder_at_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"trace_file: got .*has no folder"):
        make_toy_manager(monkeypatch, trace_file=str(tmp_path / "absent" / "t.jsonl"))


def test_a_rank_that_repeats_the_first_reports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks that share the work, the others count but do not trace."""
    monkeypatch.setenv(METRICS_DIR, str(tmp_path))
    settings = EncoderCgSettings(trace_file=str(tmp_path / "t.jsonl"))
    written = {}
    for share_items in (False, True):
        reporter = Reporter(
            make_toy_config(),
            settings,
            EncoderStats(),
            speaks_for_all=False,
            share_items=share_items,
        )
        reporter.start(SimpleNamespace(), {})  # type: ignore[arg-type]
        reporter.received("image", [])
        reporter.close()
        written[share_items] = sorted(p.suffix for p in tmp_path.iterdir())
    assert written == {False: [], True: [".db", ".db"]}


def test_files_are_written_beside_the_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "PUBLISH_SECONDS", 0.01)
    manager = make_toy_manager(monkeypatch, trace_file=str(tmp_path / "t.jsonl"))
    (thread,) = threads()
    assert thread.daemon
    manager.execute(make_items((1, 8)))
    path = None
    for _ in range(1000):
        if path := next(tmp_path.iterdir(), None):
            break
        thread.join(0.01)
    assert path is not None
    manager.log_final_stats()
    thread.join(10)
    assert not thread.is_alive()
    assert read_trace(path).items == 1


def test_the_thread_ends_with_its_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "PUBLISH_SECONDS", 0.01)
    manager = make_toy_manager(monkeypatch, trace_file=str(tmp_path / "t.jsonl"))
    (thread,) = threads()
    del manager
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_there_is_no_thread_where_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_toy_manager(monkeypatch)
    assert threads() == []
    manager.log_final_stats()


def test_a_failure_to_write_metrics_is_said_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(METRICS_DIR, str(tmp_path))
    manager = make_toy_manager(monkeypatch)

    def fail(_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(
        "vllm_encoder_cg.observability.metrics_files.MetricsFiles.write", fail
    )
    for _ in range(3):
        manager._reporter.publish()
    assert manager.execute(make_items((1, 8))) is not None
    manager.log_final_stats()
    assert package_log.text.count("no longer written") == 1
