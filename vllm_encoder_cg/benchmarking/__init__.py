# SPDX-License-Identifier: Apache-2.0
"""How long an encoder takes: eagerly, by vLLM's own graphs, by this package's."""
