# SPDX-License-Identifier: Apache-2.0
"""Recordings of what gates and feeds gave, and replays that answer from them."""
