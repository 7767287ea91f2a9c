# SPDX-License-Identifier: Apache-2.0
"""Whole engines with and without encoder graphs."""
