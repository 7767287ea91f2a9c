# SPDX-License-Identifier: Apache-2.0
"""Repeats every check and figure of the docs."""
