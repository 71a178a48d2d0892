# SPDX-License-Identifier: Apache-2.0
"""Decides which dimensions of a call may stay split, and answers XLA's partitioner."""
