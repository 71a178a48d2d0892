# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of loops in compiled programs, and the resumption from them."""
