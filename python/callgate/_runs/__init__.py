# SPDX-License-Identifier: Apache-2.0
"""Runs: folders with what belongs to a training: its config, streams and alerts."""
