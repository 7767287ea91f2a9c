# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-encoder-cg``: one module per subcommand.

These modules import torch and vLLM only inside their commands, so that
``--help`` answers at once, also where neither is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

from typer import Option, Typer

from vllm_encoder_cg import __version__
from vllm_encoder_cg.cli.errors import fail

_COMMANDS = ("bench", "demo", "models", "plan", "verify")
"""Modules here, each with a function of the same name."""


def main() -> None:
    """Entry point of the console script."""
    app = Typer(
        name="vllm-encoder-cg",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_common)
    for name in _COMMANDS:
        module = import_module(f"{__name__}.{name}")
        app.command(name)(getattr(module, name))
    try:
        app()
    except OSError as error:  # a full disk behind standard output, say
        fail(str(error))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vllm-encoder-cg {__version__}")
        raise SystemExit(0)


def _common(
    version: Annotated[
        bool,
        Option(
            "--version",
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Encoder CUDA graphs for vLLM."""
