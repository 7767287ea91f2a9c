# SPDX-License-Identifier: Apache-2.0
"""The fused forward against vLLM's: times, errors, kernels."""
