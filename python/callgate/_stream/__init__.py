# SPDX-License-Identifier: Apache-2.0
"""Streams of records in files and on sockets, read back."""
