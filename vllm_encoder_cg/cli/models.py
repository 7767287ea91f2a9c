# SPDX-License-Identifier: Apache-2.0
"""``vllm-encoder-cg models``: which models' encoders get graphs."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import Annotated

from typer import Option

from vllm_encoder_cg.cli.output import console, make_table
from vllm_encoder_cg.models.catalog import ADAPTED, native_models

_COLUMNS = ("vLLM model class", "by graph", "paths", "graphs per", "driven by")


def models(
    json: Annotated[bool, Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List the models whose encoders get CUDA graphs.

    Models without an adapter here are driven by vLLM's protocol for encoder CUDA
    graphs, where they implement it; those of the installed vLLM are listed.
    """
    native = native_models()
    if json:
        content = {
            "adapted": [asdict(model) for model in ADAPTED],
            "native": native,
        }
        print(json_format.dumps(content, indent=2))
        return
    table = make_table("", _COLUMNS, ())
    for model in ADAPTED:
        axis = f"budget and {model.axis}" if model.axis else "budget"
        paths = ", ".join(model.paths)
        table.add_row(
            model.architecture, ", ".join(model.modalities), paths, axis, "adapter"
        )
    for name in native:
        table.add_row(name, "as the model declares", "", "", "vLLM's protocol")
    console.print(table)
