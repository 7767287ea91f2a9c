# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal, results as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

_WIDTH_OF_A_FILE = 150

console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)


def make_table(
    title: str,
    columns: Sequence[str],
    numbers: Sequence[str],
    whole: Sequence[str] = (),
) -> Table:
    """An empty table; the columns named in `numbers` are aligned right, and those
    and the ones named in `whole` are not broken over lines."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        if column in numbers:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold", no_wrap=column in whole)
    return table


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar over `total` steps, on a terminal only.

    Yields:
        Called at the begin of each step, with its name.
    """
    if not console.is_terminal:
        yield lambda name: None
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=total)
        begun = False

        def begin(name: str) -> None:
            nonlocal begun
            progress.update(task, description=name, advance=1 if begun else 0)
            begun = True

        yield begin


def write_json(path: Path | None, content: dict[str, Any] | list[Any]) -> None:
    """Writes `content` where a path was given."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        fail(f"json: {path} cannot be written: {error.strerror}")
    console.print(f"written to {path}")


def fail(message: str, code: int = 2) -> NoReturn:
    """Ends the command with an error; 2: it could not do what was asked."""
    print(f"vllm-encoder-cg: {message}", file=sys.stderr)
    raise SystemExit(code)


def yes(value: bool) -> str:
    return "yes" if value else "no"


def percent(share: float) -> str:
    return f"{share:.1%}"
