# SPDX-License-Identifier: Apache-2.0
"""Compilers on this machine, and the disk cache of compiled code."""
