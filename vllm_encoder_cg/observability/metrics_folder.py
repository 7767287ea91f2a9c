# SPDX-License-Identifier: Apache-2.0
"""The folder through which a server's workers hand over their counts.

The process that serves makes it, and removes it as it exits.  It holds a lock on a
file in the folder for as long as it, or a child, lives; so what a killed server left
is told from what is in use, and removed by the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

from vllm_encoder_cg.integration.environment import METRICS_DIR

_PREFIX = "vllm-encoder-cg-metrics-"
_LOCK = "in-use"

_own: tuple[Path, int] | None = None
"""The folder that this process, or the one that it was forked from, has made, and
the descriptor of its lock."""


def join_or_make_folder() -> Path:
    """The folder of the server that this process is part of; where it is part of
    none, a new one, which its children join.

    Raises:
        OSError: the folder cannot be made.
    """
    if _is_part_of_a_server():
        return Path(os.environ[METRICS_DIR])
    _remove_abandoned()
    return _make()


def leave_folder() -> None:
    """Removes the folder that this process has made, if so."""
    global _own
    if _own is not None:
        folder, lock = _own
        _own = None
        os.environ.pop(METRICS_DIR, None)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make() -> Path:
    global _own
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _own = folder, lock
    os.environ[METRICS_DIR] = str(folder)
    atexit.register(_leave_at_exit, os.getpid())
    return folder


def _leave_at_exit(pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of that process
        leave_folder()


def _is_part_of_a_server() -> bool:
    """Whether a process that serves ``/metrics`` has started this one.

    The variable alone does not say so: a server inherits it, too, from whatever
    process with a vLLM of its own has started it.
    """
    if not os.environ.get(METRICS_DIR):
        return False
    if multiprocessing.parent_process() is not None:
        return True
    # Ray starts workers otherwise; vLLM hands them the variables.
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _remove_abandoned() -> None:
    """Removes folders of this user's processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or just removed
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
