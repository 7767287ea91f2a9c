# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal, results as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from typer import Option

from vllm_encoder_cg.cli.errors import fail

_WIDTH_OF_A_FILE = 150
_LEAST_TEXT = 10
"""Characters into which text is broken at least."""
_AROUND_A_CELL = 3
_STDOUT = Path("-")

JsonFile = Annotated[
    Path | None,
    Option(
        "--json",
        metavar="PATH",
        help="Write the results to this file; -: to standard output, and everything "
        "else to standard error.",
    ),
]


def _width() -> int | None:
    """None: rich finds out.  Standard output is None where it was closed."""
    on_a_terminal = sys.stdout is not None and sys.stdout.isatty()
    return None if on_a_terminal or "COLUMNS" in os.environ else _WIDTH_OF_A_FILE


console = Console(width=_width())


def make_table(
    title: str,
    columns: Sequence[str],
    numbers: Sequence[str],
    whole: Sequence[str] = (),
) -> Table:
    """An empty table; the columns named in `numbers` are aligned right, and the
    cells of those named in `whole` are not broken over lines."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        if column in numbers:
            table.add_column(column, justify="right")
        else:
            table.add_column(column, overflow="fold", no_wrap=column in whole)
    return table


def print_table(table: Table) -> None:
    """Prints a table so that no column vanishes: where the terminal is too narrow,
    text is broken and numbers are not, and lines become longer than the terminal
    before anything is left out."""
    total = 1
    for column in table.columns:
        column.min_width = _least_width(column)
        total += column.min_width + _AROUND_A_CELL
    if total > console.width:
        table.width = total
    console.print(table, crop=False)


def _least_width(column: Column) -> int:
    texts = [str(text) for text in (column.header, *column.cells)]
    if column.no_wrap:
        return max(
            (len(line) for text in texts for line in text.splitlines()), default=0
        )
    longest = max((len(word) for text in texts for word in text.split()), default=0)
    return longest if column.justify == "right" else min(longest, _LEAST_TEXT)


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


def begin_output(json_file: Path | None) -> None:
    """Call it first: it ends the command if `json_file` cannot be written, and keeps
    standard output free where the results go there."""
    console.stderr = json_file == _STDOUT
    if json_file != _STDOUT:
        check_writable("json", json_file)


def check_writable(option: str, path: Path | None) -> None:
    """Ends the command if `path` cannot become a file; None: none is wanted."""
    if path is None:
        return
    if path.is_dir():
        fail(f"{option}: {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        fail(f"{option}: there is no folder {path.parent}; create it, or name another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        fail(f"{option}: {path} cannot be written: no permission")


def print_line(text: str) -> None:
    """As it is, for the clipboard: not wrapped, not coloured."""
    print(text, file=console.file, flush=True)


def write_json(path: Path | None, content: dict[str, Any] | list[Any]) -> None:
    """Writes `content` where a path was given; numbers that are not finite, for
    which JSON has no word, as null."""
    if path is None:
        return
    text = json.dumps(_finite(content), indent=2)
    if path == _STDOUT:
        print(text)
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        fail(f"json: {path} cannot be written: {error.strerror}")
    console.print(f"written to {path}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def yes(value: bool) -> str:
    return "yes" if value else "no"


def percent(share: float) -> str:
    return f"{share:.1%}"
