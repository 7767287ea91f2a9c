# SPDX-License-Identifier: Apache-2.0
"""Enters results of ``gpu_check.py`` in the matrix of verified models.

    python benchmarks/record_verified.py DIR [DIR ...]
    python docs/tools/generate_docs.py

Reads every JSON file of the folders.  One whose cases are not all equal to eager,
in which a graph was dropped, or nothing was replayed, is named and left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_encoder_cg.models.verified import (
    FILE,
    Verified,
    merge,
    read_verified,
    write_verified,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    args = parser.parse_args()
    entries = read_verified()
    for folder in args.folders:
        for file in sorted(folder.glob("*.json")):
            report = json.loads(file.read_text())
            reason = refusal(report)
            if reason is not None:
                print(f"{file}: left out: {reason}")
                continue
            entries = merge(entries, (entry_of(report),))
            print(f"{file}: entered")
    write_verified(entries)
    print(f"{len(entries)} entries in {FILE}")


def refusal(report: dict[str, Any]) -> str | None:
    """Why a report verifies nothing."""
    if not report.get("complete", True):
        return report.get("inactive") or "it was ended before all cases had run"
    bad = [case["case"] for case in report["cases"] if not case["ok"]]
    if bad:
        return f"{len(bad)} cases differ from eager: {', '.join(bad)}"
    if report["stats"]["dropped_graphs"]:
        return f"{len(report['stats']['dropped_graphs'])} graphs were dropped"
    if not any(case["hits"] for case in report["cases"]):
        return "nothing was replayed"
    return None


def entry_of(report: dict[str, Any]) -> Verified:
    return Verified(
        architecture=report["architecture"],
        device=report["device"],
        vllm=report["vllm"],
        dtype=report["dtype"],
        backends=(report["attention_backend"],),
        date=report["date"],
        tower=report["tower"],
        cases=len(report["cases"]),
        worst_error=max(case["error"] for case in report["cases"]),
    )


if __name__ == "__main__":
    main()
