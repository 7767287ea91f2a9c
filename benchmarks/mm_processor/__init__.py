# SPDX-License-Identifier: Apache-2.0
"""``vllm bench mm-processor``: eager, in-tree and ours."""
