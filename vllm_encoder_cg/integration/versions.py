# SPDX-License-Identifier: Apache-2.0
"""With which versions of vLLM this package has been tested."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_encoder_cg import __version__
from vllm_encoder_cg.integration.environment import ALLOW_UNTESTED


@dataclass(frozen=True)
class TestedRange:
    """Versions ``first <= version < below``, as (major, minor)."""

    __test__ = False  # a name that starts with Test: tell pytest it is no test

    first: tuple[int, int]
    below: tuple[int, int]
    platforms: tuple[str, ...] | None = None
    """``device_type`` of vLLM's platform; None: every platform."""

    def contains(self, version: tuple[int, int], platform: str) -> bool:
        """Whether vLLM `version` on `platform` was tested."""
        return self.first <= version < self.below and (
            self.platforms is None or platform in self.platforms
        )

    def __str__(self) -> str:
        where = f" on {', '.join(self.platforms)}" if self.platforms else ""
        return (
            f">={self.first[0]}.{self.first[1]},<{self.below[0]}.{self.below[1]}{where}"
        )


TESTED = (
    TestedRange((0, 32), (0, 33), platforms=("cpu",)),
    TestedRange((0, 33), (0, 34)),
)


def parse_version(version: str) -> tuple[int, int] | None:
    """(major, minor) of a version string; None for a build without a number."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def why_untested(version: str, platform: str) -> str | None:
    """Say why `version` is outside the tested ranges; None if it is inside.

    Args:
        version: ``vllm.__version__``.  Not the version of the distribution named
            ``vllm``: the CPU build is distributed under another name.
        platform: ``vllm.platforms.current_platform.device_type``.

    """
    parsed = parse_version(version)
    if parsed and any(tested.contains(parsed, platform) for tested in TESTED):
        return None
    return (
        f"vllm-encoder-cg {__version__} has not been tested with vLLM {version} on "
        f"{platform or 'an unknown platform'} (tested: vLLM "
        f"{'; '.join(map(str, TESTED))}) and stays off; vLLM's own encoder CUDA "
        f"graphs are not touched. Set {ALLOW_UNTESTED}=1 to use it nevertheless."
    )
