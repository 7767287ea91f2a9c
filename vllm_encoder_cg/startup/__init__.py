# SPDX-License-Identifier: Apache-2.0
"""What happens once, before the first batch: which forward, how much memory, capture,
is it right, what does it cost."""
