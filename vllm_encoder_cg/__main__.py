# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_encoder_cg``: the command line without its console script."""

from __future__ import annotations

from vllm_encoder_cg.cli import main

if __name__ == "__main__":
    main()
