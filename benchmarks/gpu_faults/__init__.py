# SPDX-License-Identifier: Apache-2.0
"""Faults that only a GPU shows, one line per check."""
