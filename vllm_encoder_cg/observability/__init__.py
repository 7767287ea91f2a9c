# SPDX-License-Identifier: Apache-2.0
"""What is counted, timed, recorded and shown while serving."""
