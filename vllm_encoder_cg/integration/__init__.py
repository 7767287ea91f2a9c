# SPDX-License-Identifier: Apache-2.0
"""How this package takes its place inside vLLM: entry point, versions, patches."""
