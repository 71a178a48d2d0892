# SPDX-License-Identifier: Apache-2.0
"""Finds the dimensions of a call that may stay split, and answers XLA's partitioner."""
