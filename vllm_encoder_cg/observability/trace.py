# SPDX-License-Identifier: Apache-2.0
"""Traces: which sizes of images and videos a server was asked to encode.

A trace file has JSON lines: a header, then one record per batch with the modality
and token counts of its items, and nothing of their content.  ``trace_writer.py``
writes such files while serving; ``read_trace`` reads them, wherever this package
is installed.  For example (the header is one line in the file)::

    {
        "format": "vllm-encoder-cg-trace",
        "version": 1,
        "architecture": "Qwen3VL...",
        "min_tokens": 64,
        "max_tokens": 8192,
        "paths": {"default": {"granularity": 1}},
    }
    {"modality": "image", "tokens": [300, 1024]}
    {"modality": "image", "tokens": [529], "paths": {"global": [273], "local": [256]}}
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass as validated

from vllm_encoder_cg import __version__
from vllm_encoder_cg.definitions import EncoderCudaGraphPathConfig, GraphKey

FORMAT: Literal["vllm-encoder-cg-trace"] = "vllm-encoder-cg-trace"
VERSION = 1
"""Raised when a reader of the version before could not make sense of a file."""

MODALITIES = ("image", "video", "vision_chunk")
"""What vLLM calls the input of vision encoders; Kimi K2.5's has one for both."""

_FIELDS = ConfigDict(extra="ignore", strict=True)


def _known_modality(value: str) -> str:
    if value not in MODALITIES:
        raise ValueError(f"got {value!r}; known are {', '.join(MODALITIES)}")
    return value


@validated(frozen=True, slots=True, config=_FIELDS)
class TracePath:
    """What the model fixes for the graphs of one path."""

    granularity: Annotated[int, Field(ge=1)] = 1
    """Budgets are multiples of this (tokens of one tile)."""
    budgets: tuple[NonNegativeInt, ...] = ()
    """Token budgets of the graphs that this process had, ascending."""


@validated(frozen=True, slots=True, config=_FIELDS)
class TraceFormat:
    """What the header of every version has."""

    format: Literal["vllm-encoder-cg-trace"]
    version: Annotated[int, Field(ge=1)]


@validated(frozen=True, slots=True, config=_FIELDS)
class TraceHeader(TraceFormat):
    """The first line of a trace file."""

    architecture: str
    """Class name of the model."""
    min_tokens: NonNegativeInt
    """Smallest automatic budget of the model."""
    max_tokens: NonNegativeInt
    """Largest automatic budget under this process's configuration."""
    paths: dict[str, TracePath]
    """By name, in the model's order."""
    max_items: NonNegativeInt = 0
    """Images and videos per replay; 0: not recorded."""
    memory_bytes: NonNegativeInt = 0
    """Device memory that the graphs took; 0: not recorded."""
    package_version: str = ""


@validated(frozen=True, slots=True, config=_FIELDS)
class TraceBatch:
    """One batch of a single modality, as the manager received it."""

    modality: Annotated[str, AfterValidator(_known_modality)]
    """One of ``MODALITIES``."""
    tokens: tuple[NonNegativeInt, ...]
    """Output tokens of each item, in the order of the batch."""
    paths: dict[str, tuple[NonNegativeInt, ...]] = Field(default_factory=dict)
    """Tokens of each item per path; empty where there is only the default path."""

    def tokens_of(self, path: str) -> tuple[int, ...]:
        """Tokens of each item on `path`."""
        return self.paths.get(path, ()) if self.paths else self.tokens


@dataclass(frozen=True)
class Trace:
    """What one or several files of the same model recorded."""

    headers: tuple[TraceHeader, ...]
    """One per file."""
    batches: tuple[TraceBatch, ...]
    """File after file, in the order in which they were recorded."""

    @property
    def path_names(self) -> tuple[str, ...]:
        return tuple(self.headers[0].paths)

    @property
    def items(self) -> int:
        """Images and videos."""
        return sum(len(batch.tokens) for batch in self.batches)


class TraceError(ValueError):
    """A file is no trace, or is damaged; the message names file, line and remedy."""


def trace_header(
    architecture: str,
    budget_range: tuple[int, int],
    paths: Mapping[str, EncoderCudaGraphPathConfig],
    graphs: Iterable[GraphKey],
    max_items: int,
    memory_bytes: int,
) -> TraceHeader:
    """The header of what a manager records.

    Args:
        architecture: class name of the model.
        budget_range: its smallest and largest automatic budget.
        paths: by name, in the model's order.
        graphs: those that were captured.
        max_items: images and videos per replay.
        memory_bytes: device memory that the graphs took.
    """
    budgets: dict[str, set[int]] = {path: set() for path in paths}
    for key in graphs:
        budgets[key.path].add(key.token_budget)
    return TraceHeader(
        FORMAT,
        VERSION,
        architecture,
        *budget_range,
        {
            name: TracePath(path.token_granularity, tuple(sorted(budgets[name])))
            for name, path in paths.items()
        },
        max_items,
        memory_bytes,
        __version__,
    )


def read_trace(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> Trace:
    """Reads the trace files of one model, one per process that wrote any.

    A last line without its end, as a process leaves it that is killed while it
    writes, is left out, and so is a file without any line, beside others.
    Everything else that does not read as written is refused.

    Args:
        paths: a file, a folder (all its ``*.jsonl``), a pattern such as
            ``"trace*.jsonl"``, or several of them.

    Raises:
        FileNotFoundError: there is no such file.
        TraceError: a file is not a trace, is damaged, has a version that this
            package does not read, or is of another model than the first.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    if not files:
        raise FileNotFoundError("no trace file was named")
    sources: list[Path] = []
    headers: list[TraceHeader] = []
    batches: list[TraceBatch] = []
    for file in files:
        lines = _lines(file)
        first = next(lines, b"")
        if not first and len(files) > 1:
            continue
        sources.append(file)
        header = _read_header(file, first)
        if headers and _model(header) != _model(headers[0]):
            raise TraceError(
                f"{file}: recorded with {header.architecture} "
                f"(paths {', '.join(header.paths)}), and {sources[0]} with "
                f"{headers[0].architecture} (paths {', '.join(headers[0].paths)}); "
                "read the files of one model at a time"
            )
        headers.append(header)
        for number, line in enumerate(lines, start=2):
            batches.append(_read_batch(file, number, line, header))
    if not headers:
        raise TraceError(f"nothing was recorded in any of {len(files)} files")
    return Trace(tuple(headers), tuple(batches))


def _files(path: str | os.PathLike[str]) -> list[Path]:
    exact = Path(path)
    if exact.is_dir():
        found = sorted(exact.glob("*.jsonl"))
    elif exact.exists():
        found = [exact]
    else:
        found = sorted(Path(name) for name in glob.glob(os.fspath(path)))
    if not found:
        raise FileNotFoundError(
            f"no trace file at {path}; each process writes its number into the name, "
            "as in trace.1234.jsonl for trace_file=trace.jsonl"
        )
    return found


def _lines(file: Path) -> Iterator[bytes]:
    """The lines that were written to their end."""
    with file.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield line


_VERSION = TypeAdapter(TraceFormat)
_HEADER = TypeAdapter(TraceHeader)
_BATCH = TypeAdapter(TraceBatch)


def _read_header(file: Path, line: bytes) -> TraceHeader:
    where = f"{file}, line 1"
    if not line:
        raise TraceError(f"{where}: nothing was recorded; leave this file out")
    try:
        # By itself first: what else a later version has is not known here.
        version = _VERSION.validate_json(line).version
        if version > VERSION:
            raise TraceError(
                f"{where}: version {version} of the format, and this package reads "
                f"up to {VERSION}; upgrade vllm-encoder-cg"
            )
        header = _HEADER.validate_json(line)
    except ValidationError as error:
        raise TraceError(
            f"{where}: not the header of a trace ({_reason(error)}); name a file "
            "that additional_config.encoder_cg.trace_file wrote"
        ) from None
    return header


def _read_batch(
    file: Path, number: int, line: bytes, header: TraceHeader
) -> TraceBatch:
    try:
        batch = _BATCH.validate_json(line)
    except ValidationError as error:
        raise _damaged(file, number, _reason(error)) from None
    for path, tokens in batch.paths.items():
        if path not in header.paths:
            known = ", ".join(header.paths)
            raise _damaged(file, number, f"path {path!r} is not of {known}")
        if len(tokens) != len(batch.tokens):
            raise _damaged(
                file,
                number,
                f"{len(tokens)} items on path {path!r}, {len(batch.tokens)} in all",
            )
    return batch


def _damaged(file: Path, number: int, reason: str) -> TraceError:
    return TraceError(
        f"{file}, line {number}: damaged ({reason}); delete this line, or record the "
        "trace anew"
    )


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def _model(header: TraceHeader) -> tuple[str, tuple[str, ...]]:
    return header.architecture, tuple(header.paths)
