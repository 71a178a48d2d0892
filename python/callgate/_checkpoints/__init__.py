# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of loops in compiled programs, and how a loop goes on from one."""
