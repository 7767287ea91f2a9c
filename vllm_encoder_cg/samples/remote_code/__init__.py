# SPDX-License-Identifier: Apache-2.0
"""Code that sample checkpoints carry; each file is copied, and stands alone."""
