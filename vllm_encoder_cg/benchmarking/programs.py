# SPDX-License-Identifier: Apache-2.0
"""Python programs in processes of their own, each ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_POLL_S = 0.1
_LONGEST_END_S = 10.0


class Program:
    """One that runs, or has.

    Args:
        arguments: of this Python.
        log: receives what it and its children write.
        environment: beside this process's own.
        folder: to run it in; None: this process's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.begin = time.monotonic()
        self._log = log
        # A file, as a pipe is open for as long as any child of it lives; a session of
        # its own, whose processes can be told from all others.
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=os.environ | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.begin

    @property
    def code(self) -> int | None:
        """The exit code; None: it has not ended."""
        return self._process.poll()

    @property
    def has_ended(self) -> bool:
        """Itself; what it started may still run."""
        return self.code is not None

    @property
    def log(self) -> str:
        """All that was written so far."""
        return self._log.read_text(errors="replace")

    def wait(self, limit_s: float) -> bool:
        """Whether it ended by itself within `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while not self.has_ended:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def ask_to_end(self) -> None:
        """Itself and what it started, which may first end what they do."""
        self._signal(signal.SIGTERM)

    def stop(self, grace_s: float) -> None:
        """As Ctrl-C does, and all that is left after `grace_s` seconds at once."""
        self._process.send_signal(signal.SIGINT)
        try:
            self.wait(grace_s)
        finally:
            self.end()

    def kill(self) -> None:
        """Itself and what it started and may have left behind; not what that has
        started in sessions of its own, as a ``Program`` does."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """Kills it and waits until it has ended."""
        self.kill()
        # One that is stuck in a driver ends later, or never.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LONGEST_END_S)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def end_all(programs: Sequence[Program], grace_s: float) -> None:
    """Ends them together, those that still run after being asked to.

    Args:
        grace_s: seconds for them to end by themselves.
    """
    asked = [program for program in programs if not program.has_ended]
    for program in asked:
        program.ask_to_end()
    deadline = time.monotonic() + grace_s
    try:
        for program in asked:
            program.wait(deadline - time.monotonic())
    finally:  # also where this process is asked to end meanwhile
        # All, before any is waited for.
        for program in programs:
            program.kill()
        for program in programs:
            program.end()
