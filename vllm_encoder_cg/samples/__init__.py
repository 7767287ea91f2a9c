# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints and media that demo, verify, bench and the tests use."""
