# SPDX-License-Identifier: Apache-2.0
"""One adapter per architecture, on a few families of towers."""
