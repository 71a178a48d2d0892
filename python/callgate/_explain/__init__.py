# SPDX-License-Identifier: Apache-2.0
"""Tells the costs of a program's calls without running it."""
