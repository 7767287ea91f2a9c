# SPDX-License-Identifier: Apache-2.0
"""Budgets, costs and plans: pure functions of integers, without torch."""
