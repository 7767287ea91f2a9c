# SPDX-License-Identifier: Apache-2.0
"""How the kernels of a fused forward are launched.

A kernel that is launched early (programmatic dependent launch, Hopper and later)
is set up while the one before it ends, reads what does not depend on it, and waits
for it on the device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

early_launch = False
"""Whether to launch early where the GPU can."""


@functools.cache
def _can_launch_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def options(device: torch.device, *, early: bool = True) -> dict[str, Any]:
    """Keyword arguments of a kernel that has the parameter ``EARLY``: what follows
    ``tl.extra.cuda.gdc_wait()`` in it sees all that was launched before.

    Args:
        early: whether it may be launched early; it must not be the first on a
            stream that another one was forked to.
    """
    if early and early_launch and _can_launch_early(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
