# SPDX-License-Identifier: Apache-2.0
"""Traces: what was written is what is read, and a damaged file is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planning import item
from vllm_encoder_cg import __version__
from vllm_encoder_cg.definitions import (
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
    GraphKey,
)
from vllm_encoder_cg.observability import trace_writer
from vllm_encoder_cg.observability.trace import (
    FORMAT,
    VERSION,
    TraceBatch,
    TraceError,
    TraceHeader,
    read_trace,
    trace_header,
)
from vllm_encoder_cg.observability.trace_writer import (
    TraceWriter,
    check_trace_file,
    file_of_process,
)

TOKENS = st.integers(0, 10**6)
ONE_PATH = st.lists(TOKENS.map(item), max_size=8)
TWO_PATHS = st.lists(
    st.fixed_dictionaries({"global": TOKENS, "local": TOKENS}).map(item), max_size=8
)
MODALITIES = st.sampled_from(["image", "video"])


def header(*paths: str, architecture: str = "Qwen3VL") -> TraceHeader:
    configs = {
        path: EncoderCudaGraphPathConfig(token_granularity=i + 1)
        for i, path in enumerate(paths or ("default",))
    }
    graphs = [GraphKey(path, budget) for path in configs for budget in (128, 64)]
    return trace_header(architecture, (64, 4096), configs, graphs, 16, 2**30)


def write(
    folder: Path,
    batches: list[tuple[str, list[EncoderItemSpec]]],
    *paths: str,
    max_bytes: int = 2**20,
) -> Path:
    writer = TraceWriter(str(folder / "trace.jsonl"), max_bytes, header(*paths))
    for modality, specs in batches:
        writer.add(modality, specs)
    writer.close()
    assert writer.path is not None
    return writer.path


def damaged(tmp_path: Path, *lines: str) -> str:
    """What is said of a file with `lines` after the header."""
    path = write(tmp_path, [("image", [item(5)])])
    path.write_text("\n".join([path.read_text().splitlines()[0], *lines, ""]))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@given(st.lists(st.tuples(MODALITIES, ONE_PATH), min_size=1, max_size=8))
def test_batches_are_read_as_they_came(
    batches: list[tuple[str, list[EncoderItemSpec]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(write(Path(folder), batches))
    assert trace.batches == tuple(
        TraceBatch(modality, tuple(spec.output_tokens for spec in specs))
        for modality, specs in batches
    )
    assert trace.items == sum(len(specs) for _, specs in batches)
    assert trace.path_names == ("default",)
    for batch in trace.batches:
        assert batch.tokens_of("default") == batch.tokens


@given(st.lists(st.tuples(MODALITIES, TWO_PATHS), min_size=1, max_size=8))
def test_tokens_per_path_are_read_as_they_came(
    batches: list[tuple[str, list[EncoderItemSpec]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(write(Path(folder), batches, "global", "local"))
    assert trace.path_names == ("global", "local")
    for batch, (_, specs) in zip(trace.batches, batches, strict=True):
        for path in trace.path_names:
            expected = tuple(spec.path_output_tokens[path] for spec in specs)
            assert batch.tokens_of(path) == expected


def test_the_header_says_what_a_plan_needs(tmp_path: Path) -> None:
    path = write(tmp_path, [("image", [item({"a": 1, "b": 2})])], "a", "b")
    (read,) = read_trace(path).headers
    assert read == header("a", "b")
    assert (read.format, read.version) == (FORMAT, VERSION)
    assert (read.min_tokens, read.max_tokens, read.max_items) == (64, 4096, 16)
    assert read.paths["b"].granularity == 2
    assert read.paths["b"].budgets == (64, 128)
    assert read.package_version == __version__


def test_nothing_but_modality_and_token_counts_is_recorded(tmp_path: Path) -> None:
    specs = [EncoderItemSpec(1200, 300, {}, {"sequences": 4}, (7,))]
    _, line = write(tmp_path, [("video", specs)]).read_text().splitlines()
    assert json.loads(line) == {"modality": "video", "tokens": [300]}


# -- Reading ----------------------------------------------------------------------


@given(st.integers(1, 40))
def test_a_torn_last_line_is_left_out(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), [("image", [item(5)]), ("video", [item(1234567)])])
        whole = path.read_bytes()
        last = len(whole.splitlines(keepends=True)[-1])
        path.write_bytes(whole[: -min(cut, last)])
        assert read_trace(path).batches == (TraceBatch("image", (5,)),)


def test_files_without_a_line_hide_no_others(tmp_path: Path) -> None:
    """A server that is killed early, or whose disk is full, leaves such a file; the
    folder is read without it."""
    write(tmp_path, [("image", [item(5)])])
    (tmp_path / "killed.1.jsonl").touch()
    (tmp_path / "killed.2.jsonl").write_text('{"format": "vllm-enc')
    trace = read_trace(tmp_path)
    assert len(trace.headers) == 1
    assert trace.batches == (TraceBatch("image", (5,)),)
    with pytest.raises(TraceError, match="nothing was recorded in any of 2 files"):
        read_trace(tmp_path / "killed.*.jsonl")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"modality": "image", "tokens": [3', "Invalid JSON"),
        ("", "Invalid JSON"),
        ('{"modality": "image"}', "tokens: Field required"),
        ('{"modality": "image", "tokens": [3, -1]}', "tokens.1: "),
        ('{"modality": "image", "tokens": [1.5]}', "tokens.0: "),
        ('{"modality": "image", "tokens": ["3"]}', "tokens.0: "),
        ('{"modality": 1, "tokens": []}', "modality: "),
        (
            '{"modality": "audio", "tokens": [3]}',
            "modality: Value error, got 'audio'; known are image, video",
        ),
        (
            '{"modality": "image", "tokens": [3], "paths": {"local": [3]}}',
            "path 'local' is not of default",
        ),
        (
            '{"modality": "image", "tokens": [3], "paths": {"default": [3, 4]}}',
            "2 items on path 'default', 1 in all",
        ),
    ],
)
def test_a_damaged_line_is_named_with_what_to_do(
    line: str, reason: str, tmp_path: Path
) -> None:
    good = '{"modality": "image", "tokens": [3]}'
    message = damaged(tmp_path, good, line, good)
    assert f", line 3: damaged ({reason}" in message
    assert message.endswith("delete this line, or record the trace anew")


@pytest.mark.parametrize(
    ("content", "reason", "remedy"),
    [
        ("", "nothing was recorded", "leave this file out"),
        ('{"format": "vllm-enc', "nothing was recorded", "leave this file out"),
        ("prompt,tokens\n", "not the header of a trace", "trace_file wrote"),
        ('{"format": "other", "version": 1}\n', "not the header", "trace_file wrote"),
        (
            f'{{"format": "{FORMAT}", "version": 1}}\n',
            "not the header of a trace (architecture: Field required)",
            "trace_file wrote",
        ),
        (
            f'{{"format": "{FORMAT}", "version": 7}}\n',
            "version 7 of the format, and this package reads up to 1",
            "upgrade vllm-encoder-cg",
        ),
    ],
)
def test_what_is_no_trace_is_refused(
    content: str, reason: str, remedy: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.1.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert f"{path}, line 1: " in message
    assert reason in message and message.endswith(remedy)


def test_fields_of_a_later_package_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, [("image", [item(5)])])
    first = json.loads(path.read_text().splitlines()[0]) | {"later": 1}
    second = {"modality": "image", "tokens": [6], "later": {}}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    assert read_trace(path).batches == (TraceBatch("image", (6,)),)


def test_several_files_and_how_they_are_named(tmp_path: Path) -> None:
    for tokens in (1, 2, 3):
        path = write(tmp_path, [("image", [item(tokens)])])
        path.rename(tmp_path / f"trace.{tokens}.jsonl")
    one, two, three = (tmp_path / f"trace.{i}.jsonl" for i in (1, 2, 3))

    def tokens_of(paths: object) -> list[int]:
        trace = read_trace(paths)  # type: ignore[arg-type]
        assert len(trace.headers) == len(trace.batches)
        return [batch.tokens[0] for batch in trace.batches]

    assert tokens_of(two) == [2]
    assert tokens_of([three, str(one)]) == [3, 1]
    assert tokens_of(tmp_path) == [1, 2, 3]
    assert tokens_of(str(tmp_path / "trace.[12].jsonl")) == [1, 2]
    assert tokens_of([tmp_path, one]) == [1, 2, 3], "each file once"


@pytest.mark.parametrize("paths", [[], "absent.jsonl", "absent*.jsonl"])
def test_no_file_is_an_error_of_its_own(
    paths: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no trace file"):
        read_trace(paths)  # type: ignore[arg-type]


def test_traces_of_two_models_do_not_mix(tmp_path: Path) -> None:
    files = []
    for architecture in ("Qwen3VL", "InternVL"):
        writer = TraceWriter(
            str(tmp_path / f"{architecture}.jsonl"),
            2**20,
            header(architecture=architecture),
        )
        writer.add("image", [item(5)])
        writer.close()
        assert writer.path is not None
        files.append(writer.path)
    with pytest.raises(TraceError, match=r"InternVL.*Qwen3VL.*one model at a time"):
        read_trace(files)


def test_the_documented_lines_are_a_trace(tmp_path: Path) -> None:
    document = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    lines = re.findall(r'^\{"modality".*$', document, re.MULTILINE)
    path = write(
        tmp_path, [("image", [item({"global": 1, "local": 2})])], "global", "local"
    )
    path.write_text("\n".join([path.read_text().splitlines()[0], *lines, ""]))
    assert len(read_trace(path).batches) == len(lines) == 2
    for field in dataclasses.fields(TraceHeader):
        assert f"`{field.name}`" in document


# -- Writing ----------------------------------------------------------------------


def test_each_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    name = str(tmp_path / "trace.jsonl")
    first = write(tmp_path, [("image", [item(1)])])
    assert first == tmp_path / f"trace.{os.getpid()}.jsonl"
    before = first.read_bytes()
    # Another process may have had this number, in another container say.
    assert file_of_process(name) == tmp_path / f"trace.{os.getpid()}-1.jsonl"
    assert write(tmp_path, [("image", [item(2)])]) == file_of_process(name).with_name(
        f"trace.{os.getpid()}-1.jsonl"
    )
    assert first.read_bytes() == before
    assert not (tmp_path / "trace.jsonl").exists()


def test_without_a_batch_there_is_no_file(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "trace.jsonl"), 2**20, header())
    writer.flush()
    writer.close()
    assert list(tmp_path.iterdir()) == []


@given(st.integers(200, 3000), st.lists(ONE_PATH, min_size=1, max_size=60))
def test_a_file_does_not_exceed_its_bound(
    max_bytes: int, batches: list[list[EncoderItemSpec]]
) -> None:
    """What is in it is the beginning of the trace, without a torn line."""
    all_ = [("image", specs) for specs in batches]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), all_, max_bytes=max_bytes)
        content = path.read_bytes()
        assert len(content) <= max_bytes
        if not content:
            return  # not even the header fits
        assert content.endswith(b"\n")
        found = read_trace(path).batches
    for batch, specs in zip(found, batches, strict=False):
        assert batch.tokens == tuple(spec.output_tokens for spec in specs)
    if len(found) < len(batches):
        left = {
            "modality": "image",
            "tokens": [s.output_tokens for s in batches[len(found)]],
        }
        line = len(json.dumps(left, separators=(",", ":"))) + 1
        assert len(content) + line > max_bytes


def test_the_end_is_said_once(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [("image", [item(5)])] * 100, max_bytes=500)
    assert package_log.text.count("is complete") == 1
    assert "trace_max_mib" in package_log.text


def test_a_disk_that_fails_ends_the_trace_and_nothing_else(
    tmp_path: Path, package_log: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "removed"
    writer = TraceWriter(str(folder / "trace.jsonl"), 2**20, header())
    for _ in range(3):
        writer.add("image", [item(5)])
        writer.flush()
    writer.close()
    assert package_log.text.count("The encoder trace ends") == 1


def test_what_cannot_be_written_in_time_is_left_out_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package_log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trace_writer, "MAX_WAITING", 10)
    path = write(tmp_path, [("image", [item(i)]) for i in range(25)])
    assert len(read_trace(path).batches) == 10
    assert "lacks 15 batches" in package_log.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent/trace.jsonl", "has no folder"),
        ("file/trace.jsonl", "has no folder"),
        (".", "is a folder"),
        ("x" * 5000, "File name too long"),
        ("x" * 254, "File name too long"),  # with the number of a process
        ("trace\0.jsonl", "zero byte"),
    ],
)
def test_a_name_that_cannot_be_written_to_is_refused_at_start_up(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError) as caught:
        check_trace_file(name)
    message = str(caught.value)
    assert message.startswith(f"additional_config.encoder_cg.trace_file: got {name!r}")
    assert reason in message
    assert "; " in message, "a remedy follows"
    check_trace_file("trace.jsonl")
