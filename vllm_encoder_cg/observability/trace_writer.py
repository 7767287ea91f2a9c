# SPDX-License-Identifier: Apache-2.0
"""Writing a trace (``trace.py``) while serving."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from vllm_encoder_cg.definitions import EncoderItemSpec
from vllm_encoder_cg.logger import init_logger
from vllm_encoder_cg.observability.trace import TraceHeader
from vllm_encoder_cg.settings import SettingError

logger = init_logger(__name__)

MAX_WAITING = 20_000
"""Batches in memory that are yet to be written; further ones are left out."""

_OPTION = "additional_config.encoder_cg.trace_file"


def file_of_process(trace_file: str) -> Path:
    """The name with this process's number before the suffix: ``trace.1234.jsonl``
    for ``trace.jsonl``.  Where that exists, as the number was another process's
    before, ``trace.1234-1.jsonl`` and so on."""
    wanted = Path(trace_file)
    number = f"{os.getpid()}"
    for attempt in range(1, 10_000):
        path = wanted.with_name(f"{wanted.stem}.{number}{wanted.suffix}")
        if not path.exists():
            break
        number = f"{os.getpid()}-{attempt}"
    return path


def check_trace_file(trace_file: str) -> None:
    """Refuses a name that cannot be written to.

    Raises:
        SettingError: its folder does not exist or is not writable, or it is a folder or
            no name of a file.
    """
    wanted = Path(trace_file)
    folder = wanted.parent
    try:
        if wanted.is_dir() or not wanted.name:
            reason, remedy = "is a folder", "name a file in it, such as trace.jsonl"
        elif not folder.is_dir():
            reason = f"has no folder {folder} here"
            remedy = "create it, or name another"
        elif not os.access(folder, os.W_OK | os.X_OK):
            reason = f"is in {folder}, to which this process may not write"
            remedy = "name another folder"
        elif "\0" in trace_file:
            reason, remedy = "has a zero byte", "leave it out"
        else:
            file_of_process(trace_file)
            return
    except OSError as error:  # a name too long, or behind a folder that is closed
        reason, remedy = f"cannot be looked for ({error.strerror})", "name another file"
    raise SettingError(f"{_OPTION}: got {trace_file!r}, which {reason}; {remedy}")


class TraceWriter:
    """Appends batches to one file of this process.

    ``add`` only remembers a batch; ``flush``, called by another thread, writes.
    Neither raises: what cannot be written is left out, with one warning.

    Args:
        trace_file: the setting of that name.
        max_bytes: size that the file does not exceed; recording ends there.
        header: its first line.
    """

    def __init__(self, trace_file: str, max_bytes: int, header: TraceHeader) -> None:
        self._trace_file = trace_file
        self._left_bytes = max_bytes
        self._header = header
        self._waiting: deque[tuple[str, Sequence[EncoderItemSpec]]] = deque()
        self._stream: IO[bytes] | None = None
        self._ended = False
        self._left_out = 0
        self.path: Path | None = None
        """The file, once there is one."""

    def add(self, modality: str, specs: Sequence[EncoderItemSpec]) -> None:
        """Remembers a batch; `specs` must not change later."""
        if self._ended:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._left_out += 1
            return
        self._waiting.append((modality, specs))

    def flush(self) -> None:
        """Writes what was added before."""
        if self._ended or not self._waiting:
            return
        try:
            self._write()
        except OSError as error:
            self._end()
            logger.warning(
                "The encoder trace ends, as %s cannot be written: %s",
                self.path or self._trace_file,
                error,
            )

    def close(self) -> None:
        """Writes the rest and closes the file."""
        self.flush()
        if self._left_out:
            logger.warning(
                "The encoder trace %s lacks %d batches, which came faster than they "
                "could be written",
                self.path,
                self._left_out,
            )
        self._end()

    def _write(self) -> None:
        if self._stream is None:
            self.path = file_of_process(self._trace_file)
            self._stream = self.path.open("xb")
            logger.info("Recording sizes of images and videos in %s", self.path)
            self._put(asdict(self._header))
        while self._waiting and not self._ended:
            modality, specs = self._waiting.popleft()
            self._put(_record(modality, specs))
        if self._stream is not None:
            self._stream.flush()

    def _put(self, value: object) -> None:
        assert self._stream is not None
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        if len(line) > self._left_bytes:
            logger.info(
                "The encoder trace %s is complete: the next batch would exceed "
                "additional_config.encoder_cg.trace_max_mib",
                self.path,
            )
            self._end()
            return
        self._left_bytes -= len(line)
        self._stream.write(line)

    def _end(self) -> None:
        self._ended = True
        self._waiting.clear()
        if self._stream is not None:
            stream, self._stream = self._stream, None
            try:
                stream.close()
            except OSError as error:
                logger.warning("Cannot finish the encoder trace: %s", error)


def _record(modality: str, specs: Sequence[EncoderItemSpec]) -> dict[str, object]:
    """One batch as its line says it."""
    record: dict[str, object] = {
        "modality": modality,
        "tokens": [spec.output_tokens for spec in specs],
    }
    paths = dict.fromkeys(path for spec in specs for path in spec.path_output_tokens)
    if paths:
        record["paths"] = {
            path: [spec.get_path_output_tokens(path) for spec in specs]
            for path in paths
        }
    return record
