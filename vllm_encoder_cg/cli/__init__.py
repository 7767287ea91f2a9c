# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-encoder-cg``: one module per subcommand.

These modules import torch and vLLM only inside their commands, so that
``--help`` answers at once, also where neither is installed.
"""

from __future__ import annotations

from importlib import import_module

_COMMANDS = ("demo", "verify")
"""Modules here, each with a function of the same name."""


def main() -> None:
    """Entry point of the console script."""
    import typer

    app = typer.Typer(
        name="vllm-encoder-cg",
        help="Encoder CUDA graphs for vLLM.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_version_option)
    for name in _COMMANDS:
        module = import_module(f"{__name__}.{name}")
        app.command(name)(getattr(module, name))
    app()


def _version_option() -> None:
    """Encoder CUDA graphs for vLLM."""
