# SPDX-License-Identifier: Apache-2.0
"""Recordings of the results of gates and feeds, and replays that answer calls from them."""
