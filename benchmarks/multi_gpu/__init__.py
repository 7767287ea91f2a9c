# SPDX-License-Identifier: Apache-2.0
"""Everything that several GPUs must show, for any number of them."""
